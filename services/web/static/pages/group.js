// One group: where it is or how it ended, its prompt, and each completion with its scores and advantage.
import { useAnswer } from "../api.js";
import { count, duration, fixed, percent, plain, range, short, signed } from "../format.js";
import { Answer, Badge, Facts, Name, Page, Pages, Panel, Passage } from "../parts.js";
import { link, linkToSamples, route, useStore } from "../state.js";
import { html } from "../vendor/htm-preact.js";
import { quoted } from "./samples/samples.js";

const PAGE = 16;
const PLACES = { replay: "good", drawn: "good", trained: "good", failed: "bad", dropped: "warn", requeued: "warn", interrupted: "warn" };

const Tokens = ({ passage, label }) => {
  if (!passage) return html`<p class="empty">Its tokens were deleted.</p>`;
  return html`<${Passage} label=${label} text=${passage.text ?? passage.token_ids.join(" ")} />`;
};

// The policy versions that sampled the tokens, as a bar and in words.
function Spans({ segment }) {
  const { spans, length } = segment;
  if (!spans.length) return html`<p class="spans note">versions ${range(segment.oldest, segment.newest)}</p>`;
  const words = spans.map((span) => `v${span.version}: tokens ${span.start} to ${span.end - 1}`).join(", ");
  return html`<div class="spans">
    <div class="span-bar" role="img" aria-label=${`Policy versions: ${words}`}>
      ${spans.map((span, i) => html`<i key=${i} class=${`shade-${i % 4}`} title=${`v${span.version}, tokens ${span.start} to ${span.end - 1}`} style=${{ flexGrow: Math.max(1, span.end - span.start) }}></i>`)}
    </div>
    <p class="note">${spans.map((span, i) => html`<span class="span-key" key=${i}><i class=${`swatch shade-${i % 4}`}></i>v${span.version} <span>${span.start}–${span.end - 1}</span></span>`)} of ${count(length)} tokens</p>
  </div>`;
}

function Advantage({ value, most }) {
  if (value === null) return html`<span>–</span>`;
  const share = most > 0 ? Math.min(1, Math.abs(value) / most) : 0;
  return html`<span class="advantage"><span class="balance" aria-hidden="true"><i class=${value < 0 ? "loss" : "gain"} style=${{ width: `${50 * share}%` }}></i></span>${signed(value)}</span>`;
}

// What the policy said, or what it read in between, which is folded.
function Part({ part, name, label, alone }) {
  const passage = html`<${Tokens} passage=${part.passage} label=${label} />`;
  const tokens = `${count(part.passage.tokens)} tokens`;
  if (!part.sampled) return html`<details class="read"><summary>Environment, ${tokens}</summary>${passage}</details>`;
  if (alone) return passage;
  const took = part.sampled_s !== null && html` in ${duration(part.sampled_s)}${part.waited_s >= 0.05 && `, after ${duration(part.waited_s)} in its environment`}`;
  return html`<section class="said" aria-label=${name}><p class="note">Policy, ${tokens}${took}</p>${passage}</section>`;
}

// A segment: its own context, if it does not follow the prompt, and its tokens.
const Segment = ({ segment, name, titled }) =>
  html`<section class="segment" aria-label=${name}>
    ${titled && html`<h4>${name} <span class="note">${count(segment.length)} tokens${segment.tool_tokens > 0 && `, ${count(segment.tool_tokens)} from tools`}</span></h4>`}
    <${Spans} segment=${segment} />
    ${segment.context && html`<details><summary>Context, ${count(segment.context.tokens)} tokens</summary><${Tokens} passage=${segment.context} label=${`Context of ${name}`} /></details>`}
    ${segment.parts === null && html`<${Tokens} passage=${null} />`}
    ${(segment.parts ?? []).map((part, i) => html`<${Part} key=${i} part=${part} name=${`Turn ${i} of ${name}`} label=${`Text of ${name}${i ? `, part ${i}` : ""}`} alone=${segment.parts.length === 1} />`)}
  </section>`;

const Completion = ({ completion, most }) =>
  html`<article class="completion" aria-label=${`Completion ${completion.index}`}>
    <h3>Completion ${completion.index}${completion.truncated && html` <${Badge} kind="warn">truncated<//>`}</h3>
    <dl class="figures">
      <div><dt>Reward</dt><dd>${short(completion.reward)}</dd></div>
      <div><dt>Advantage</dt><dd><${Advantage} value=${completion.advantage} most=${most} /></dd></div>
      ${Object.entries(completion.scores).map(([verifier, score]) => html`<div key=${verifier}><dt title="unweighted score of a verifier">${plain(verifier)}</dt><dd>${short(score)}</dd></div>`)}
      <div><dt>Length</dt><dd>${count(completion.length)} tokens</dd></div>
      ${completion.tool_tokens > 0 && html`<div><dt>From tools</dt><dd>${count(completion.tool_tokens)} tokens</dd></div>`}
      ${completion.turns > 1 && html`<div><dt>Turns</dt><dd>${count(completion.turns)}</dd></div>`}
      ${completion.tool_calls > 0 && html`<div><dt>Tool calls</dt><dd>${count(completion.tool_calls)}</dd></div>`}
      ${completion.malformed_calls > 0 && html`<div><dt>Malformed calls</dt><dd>${count(completion.malformed_calls)}</dd></div>`}
      ${completion.tool_s > 0 && html`<div><dt>Environment time</dt><dd>${duration(completion.tool_s)}</dd></div>`}
    </dl>
    ${completion.segments.map((segment, i) => {
      const titled = completion.segments.length > 1;
      const name = `${titled ? `segment ${i} of ` : ""}completion ${completion.index}`;
      return html`<${Segment} key=${segment.index} segment=${segment} titled=${titled} name=${name} />`;
    })}
    ${Object.entries(completion.note ?? {}).map(([verifier, said]) => html`<p key=${verifier} class="note">${plain(verifier)}: ${plain(JSON.stringify(said))}</p>`)}
  </article>`;

// The sample log keeps completions whose tokens were deleted here. A group enters it when it ends.
const logged = (group, found) => (!found || found.outcome) && html`<a href=${linkToSamples({ where: `group == ${quoted(group)}` })}>Its completions in the sample log</a>`;

const facts = (found) => [
  ["Place", html`<${Badge} kind=${PLACES[found.place] ?? "calm"}>${found.place}<//> ${plain(found.where)}`],
  found.holder && ["Claimed by", `${plain(found.holder.consumer)}, claim ${found.holder.fence}, lease renewed ${duration(found.holder.idle_s)} ago`],
  (found.attempts > 0 || found.expiries > 0) && ["Retries", `${found.attempts} failures, ${found.expiries} expired leases`],
  found.ended_at && ["Ended", html`${plain(found.outcome)}, <time datetime=${found.ended_at}>${new Date(found.ended_at).toLocaleString()}</time>`],
  found.dead_letter && ["Dead letter", html`<a href=${link("deadletters", found.dead_letter)}>${found.dead_letter}</a>`],
  found.steps.length > 0 && ["Steps", found.steps.map((step, i) => html`${i > 0 && ", "}<a key=${step.step} href=${link("steps", step.step)}>${step.step}</a> (${step.committed ? "trained" : "prepared"})`)],
  found.seq !== null && ["Order of issue", count(found.seq)],
  found.uses !== null && ["Uses", count(found.uses)],
  found.weight !== null && ["Sampling weight", `${short(found.weight)}${found.probability === null ? "" : `, probability ${percent(found.probability, 2)}`}`],
  found.source !== null && ["Source", html`<${Name}>${found.source}<//>`],
  found.generator !== null && ["Generated by", `${plain(found.generator)} in ${duration(found.generate_s)}, scored in ${duration(found.score_s)}`],
  found.answer !== null && ["Gold answer", html`<${Name}>${found.answer}<//>`],
];

export function GroupPage({ path }) {
  const { query } = useStore(route);
  const offset = Number(query.get("offset")) || 0;
  const answer = useAnswer(`v1/groups/${encodeURIComponent(path[1])}?limit=${PAGE}&offset=${offset}`);
  return html`<${Page} title=${`Group ${plain(path[1])}`} lead="One prompt with its completions, scores and advantages." tools=${logged(path[1], answer.data)}>
    <${Answer} of=${answer}>
      ${(found) => {
        const most = Math.max(0, ...found.completions.map((completion) => Math.abs(completion.advantage ?? 0)));
        const rewards = found.completions.map((completion) => completion.reward).filter((reward) => reward !== null);
        const mean = rewards.length ? `mean reward ${fixed(rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length, 3)}` : "";
        return html`<${Panel} title="State"><${Facts} of=${facts(found)} />${found.notes.map((note) => html`<p class="fault" key=${note}>${plain(note)}</p>`)}<//>
          ${found.prompt && html`<${Panel} title="Prompt" note=${`${count(found.prompt.tokens)} tokens`}><${Tokens} passage=${found.prompt} label="Text of the prompt" /><//>`}
          ${found.completions.length > 0 &&
          html`<${Panel} title="Completions" note=${`${count(found.size)}${found.completions.length === found.size && mean ? `, ${mean}` : ""}`} kind="bare">
            ${found.completions.map((completion) => html`<${Completion} key=${completion.index} completion=${completion} most=${most} />`)}
            <${Pages} label="Pages of completions" offset=${offset} page=${PAGE} shown=${found.completions.length} total=${found.size} />
          <//>`}`;
      }}
    <//>
  <//>`;
}
