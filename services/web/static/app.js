// The frame of the page: the run's name and state, navigation, and the page of the current route.
import { lockAgain, askForToken, Action, Operator, checkpoint, pause, resume, scale, stop } from "./actions.js";
import { read, session, unlock } from "./api.js";
import { Dialogs, perform, Said } from "./dialog.js";
import { count, duration, plain } from "./format.js";
import { keepFollowing, live, retryNow } from "./live.js";
import { Badge, Meter } from "./parts.js";
import { generators, mood, pausedRoles, trainedSteps } from "./run.js";
import { link, now, route, switchTheme, theme, tokenOfLink, useStore } from "./state.js";
import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { AccountPage } from "./pages/account.js";
import { BufferPage } from "./pages/buffer.js";
import { CheckpointsPage } from "./pages/checkpoints.js";
import { ConfigurationPage } from "./pages/configuration.js";
import { DeadLetterPage, DeadLettersPage } from "./pages/deadletters.js";
import { EvaluationPage } from "./pages/evaluation.js";
import { FleetPage } from "./pages/fleet.js";
import { GroupPage } from "./pages/group.js";
import { LedgerPage } from "./pages/ledger.js";
import { MissingPage } from "./pages/missing.js";
import { OverviewPage } from "./pages/overview.js";
import { SamplePage } from "./pages/samples/sample.js";
import { SamplesPage } from "./pages/samples/samples.js";
import { StepPage, StepsPage } from "./pages/steps.js";
import { SyncPage } from "./pages/sync.js";

const NAV = [
  ["", "Overview"], ["fleet", "Fleet"], ["steps", "Steps"], ["samples", "Samples"], ["buffer", "Buffer"], ["sync", "Weight sync"],
  ["ledger", "Ledger"], ["deadletters", "Dead letters"], ["checkpoints", "Checkpoints"], ["evaluation", "Evaluation"],
  ["account", "Account"], ["configuration", "Configuration"],
];
const ABOVE = { groups: "buffer" }; // pages that belong to an entry of the navigation

const PAGES = { account: AccountPage, configuration: ConfigurationPage, fleet: FleetPage, buffer: BufferPage, sync: SyncPage, ledger: LedgerPage, checkpoints: CheckpointsPage, evaluation: EvaluationPage };

function pageOf([name, id, ...rest]) {
  if (rest.length) return MissingPage;
  if (!name) return OverviewPage;
  if (name === "steps") return id ? StepPage : StepsPage;
  if (name === "samples") return id ? SamplePage : SamplesPage;
  if (name === "deadletters") return id ? DeadLetterPage : DeadLettersPage;
  if (name === "groups" && id) return GroupPage;
  return (id ? null : PAGES[name]) ?? MissingPage;
}

function Nav({ here, frame, close }) {
  const badge = { deadletters: frame?.dead_letters || null, fleet: frame?.fleet.total || null };
  return html`<nav id="nav" aria-label="Pages">
    <ul>
      ${NAV.map(
        ([name, title]) =>
          html`<li key=${name}>
            <a href=${link(...(name ? [name] : []))} aria-current=${here === name ? "page" : undefined} onClick=${close}>
              ${title}${badge[name] && html` <${Badge} kind=${name === "deadletters" ? "warn" : ""}>${count(badge[name])}<//>`}
            </a>
          </li>`,
      )}
    </ul>
  </nav>`;
}

function Buttons({ frame }) {
  const state = frame?.state;
  const paused = pausedRoles(state);
  const over = !state || Boolean(state.finished);
  const off = over || Boolean(state.stopping);
  return html`<${Operator}>
    <div class="buttons" role="group" aria-label="Operate the run">
      ${paused.length > 0 && html`<${Action} kind="primary" disabled=${over} onClick=${resume}>Resume<//>`}
      ${paused.length < 3 && html`<${Action} disabled=${off} onClick=${pause}>Pause …<//>`}
      <${Action} disabled=${off} onClick=${() => scale(state.scale.wanted ?? generators(frame).there, state.scale.most)}>Scale …<//>
      <${Action} disabled=${over} onClick=${checkpoint}>Checkpoint<//>
      <${Action} kind="danger" disabled=${off} onClick=${stop}>Stop …<//>
    </div>
  <//>`;
}

function Connection() {
  const current = useStore(live);
  const here = useStore(now);
  const wait_s = Math.max(0, Math.ceil(current.retry_at - here));
  const { link: how, frame } = current;
  const again = html`<button type="button" onClick=${retryNow}>Retry now</button>`;
  let text = null;
  if (how === "lost") text = html`Disconnected: ${current.why}. ${frame ? "Figures are out of date. " : ""}Retrying<span aria-hidden="true">${wait_s ? ` in ${wait_s} s` : ""}</span>. ${again}`;
  else if (how === "ended")
    text = html`The console was stopped${frame?.state?.finished ? html`; the run has finished: ${plain(frame.state.finished)}` : ""}. To view the run again, start <code>grpo web</code>. ${again}`;
  else if (how === "denied") text = html`Viewing this run requires a token. Open a link that <code>grpo web</code> prints, or <button type="button" onClick=${askForToken}>enter a token</button>`;
  else if (frame?.fault) text = html`Redis does not respond: ${plain(frame.fault)}. Figures are out of date.`;
  return html`<div class="banners" role="status">${text && html`<p class=${`banner ${how === "ended" ? "" : "bad"}`}>${text}</p>`}</div>`;
}

function Head({ about, open, setOpen }) {
  const current = useStore(live);
  const { operates } = useStore(session);
  const mode = useStore(theme);
  const { frame } = current;
  const state = frame?.state;
  const how = mood(current);
  const done = trainedSteps(state);
  return html`<header>
    <div class="brand">
      <button type="button" class="menu" aria-expanded=${open} aria-controls="nav" onClick=${() => setOpen(!open)}>Menu</button>
      <a class="home" href="#/" aria-label="grpo, overview"><img src="icon.svg" alt="" width="20" height="20" /><b>grpo</b></a>
      <span class="run-name">${about ? plain(about.run) : ""}</span>
    </div>
    <div class="state">
      <${Badge} kind=${how.kind}>${how.word}<//>
      ${state &&
      html`<span class="progress">
        <${Meter} value=${done} of=${state.steps} label="Steps trained" />
        <span>${count(done)} of ${count(state.steps)} steps</span>
        ${done < state.steps && !state.finished && frame.steps.left_s !== null && html`<span class="note">${duration(frame.steps.left_s)} left</span>`}
      </span>`}
    </div>
    <div class="own">
      <button type="button" onClick=${operates ? lockAgain : askForToken}>${operates ? "Lock" : "Operate …"}</button>
      <button type="button" onClick=${switchTheme} aria-label=${`Switch to the ${mode === "dark" ? "light" : "dark"} theme`}>${mode === "dark" ? "Light" : "Dark"}</button>
    </div>
    <${Buttons} frame=${frame} />
  </header>`;
}

function App() {
  const { path } = useStore(route);
  const current = useStore(live);
  const [about, setAbout] = useState(null);
  const [open, setOpen] = useState(false);
  const where = path.join("/");
  useEffect(() => {
    if (!current.opened) return undefined;
    const aborter = new AbortController();
    read("v1/console/about", aborter.signal).then(setAbout, () => {});
    return () => aborter.abort();
  }, [current.opened]);
  useEffect(() => {
    const main = document.getElementById("main");
    main.scrollTop = 0;
    scrollTo(0, 0);
    if (moved) main.querySelector("h1")?.focus({ preventScroll: true });
    moved = true;
  }, [where]);
  const Current = pageOf(path);
  return html`<button type="button" class="skip" onClick=${() => document.querySelector("main h1")?.focus()}>Skip to content</button>
    <div class=${`frame ${open ? "open" : ""}`}>
      <${Head} about=${about} open=${open} setOpen=${setOpen} />
      <${Nav} here=${ABOVE[path[0]] ?? path[0] ?? ""} frame=${current.frame} close=${() => setOpen(false)} />
      <main id="main"><${Connection} /><${Current} key=${where} path=${path} frame=${current.frame} about=${about} /></main>
    </div>
    <${Dialogs} /><${Said} />`;
}

let moved = false; // the first page leaves the focus where the browser put it

const logIn = (token) => perform(async () => ((await unlock(token)) ? "This tab can operate the run." : "This tab can view the run."));

tokenOfLink.listen(logIn);
if (tokenOfLink.get()) logIn(tokenOfLink.get());
else if (session.get().token) unlock(session.get().token).catch(() => {});
keepFollowing();
render(html`<${App} />`, document.getElementById("app"));
