// The run at a glance: whether it is healthy, whether it learns, and what it waits for.
import { useAnswer } from "../api.js";
import { Chart } from "../charts/chart.js";
import { laid } from "../charts/lines.js";
import { Passes } from "../charts/passes.js";
import { Smoothing } from "../charts/smoothing.js";
import { count, duration, fixed, percent, plain, short } from "../format.js";
import { Ago, Answer, Badge, Facts, Meter, Page, Panel, Tile } from "../parts.js";
import { desired, generators, pausedRoles, told, version } from "../run.js";
import { choose, link, route, useStore } from "../state.js";
import { html, useMemo } from "../vendor/htm-preact.js";
import { StepsTable } from "./steps_table.js";
import { waiting } from "./waiting.js";

const POINTS = 400;
const RECENT = 6;
const ROUNDS = 100;
const NONE = [];

function Tiles({ frame, about, metrics }) {
  const { state } = frame;
  const bound = about?.facts["admission.max_staleness"];
  const fleet = generators(frame);
  const wanted = desired(frame, about);
  const lag = metrics["staleness/trained/max"];
  const share = (part) => percent(metrics[`time/${part}_s`] / metrics["time/elapsed_s"]);
  return html`<dl class="tiles">
    <${Tile} label="Reward" value=${fixed(metrics["reward/train/mean"], 3)} note=${frame.steps.last < 0 ? "no step yet" : `± ${fixed(metrics["reward/train/std"], 2)} in step ${frame.steps.last}`} />
    <${Tile} label="Max lag" value=${count(lag)} unit=${bound === undefined ? "" : `of ${bound} allowed`} kind=${lag > bound ? "bad" : ""} note=${`mean ${fixed(metrics["staleness/trained/mean"], 2)} steps`} />
    <${Tile} label="Generated" value=${count(metrics["throughput/generated/tokens_per_s"])} unit="tok/s" note=${`trained ${count(metrics["throughput/trained/tokens_per_s"])} tok/s`} />
    <${Tile} label="Step" value=${duration(metrics["time/elapsed_s"])} note=${`training ${share("train")}, sync ${share("sync")}, waiting for data ${share("wait")}`} />
    <${Tile} label="Slots in use" value=${count(state.slots_used)} unit=${`of ${count(state.slots)}`} note=${html`<${Meter} value=${state.slots_used} of=${state.slots} label="Slots in use" />`} />
    <${Tile} label="Generators working" value=${fleet.atWork} unit=${wanted === undefined ? "" : `of ${wanted} desired`} kind=${fleet.atWork < wanted ? "warn" : ""} note=${`${version(state.published_version)} published`} />
  </dl>`;
}

// What a run that does not train waits for, or why it does not run.
function Notice({ frame }) {
  const { condition, awaited, state } = frame;
  const first = state.committed_step < 0 && !state.ended ? " before its first step" : "";
  const text = awaited ? `The run is waiting for ${awaited}${first}.` : condition.word === "running" ? "" : told(condition);
  return text && html`<p class="banner" role="status">${plain(text)}</p>`;
}

function StatePanel({ frame, about }) {
  const { state } = frame;
  const paused = pausedRoles(state);
  return html`<${Panel} title="State">
    <${Facts}
      of=${[
        ...paused.map((role) => [
          `${role} paused`,
          html`<${Badge} kind="warn">paused<//> ${plain(state.paused[role])}${state.paused_since[role] && html`, <${Ago} at=${state.paused_since[role]} />`}`,
        ]),
        !paused.length && ["Paused", "none"],
        !paused.length && state.last_resume && ["Resumed", html`by ${plain(state.last_resume)}, <${Ago} at=${state.last_resume_at} />`],
        state.stopping && ["Stopping", plain(state.stopping)],
        state.finished && ["Finished", plain(state.finished)],
        state.restore >= 0 && ["Restoring", `the checkpoint of step ${state.restore}${state.restore_why && `, requested by ${plain(state.restore_why)}`}`],
        state.restore_failed && ["Restore failed", html`<span class="bad-text">step ${plain(state.restore_failed.replace(" ", ": "))}</span>`],
        ["Steps", `${state.committed_step + 1} trained, ${Math.max(0, state.prepared_step - state.committed_step)} prepared ahead`],
        ["Policy version", version(state.published_version)],
        ["Checkpoint", html`<a href=${link("checkpoints")}>${state.checkpointed_step < 0 ? "none yet" : `step ${state.checkpointed_step}`}</a>${state.checkpoint && ` – another is requested: ${plain(state.checkpoint)}`}`],
        state.checkpoint_failed && ["Checkpoint failed", html`<span class="bad-text">${plain(state.checkpoint_failed)}</span>`],
        desired(frame, about) !== undefined && state.scale.wanted !== null && ["Desired generators", `${state.scale.wanted}${state.scale.why && ` – ${plain(state.scale.why)}`}`],
        frame.dead_letters > 0 && ["Dead letters", html`<a href=${link("deadletters")}>${count(frame.dead_letters)}</a>`],
        ["Dataprep leader", state.leader ? plain(state.leader) : "none"],
        state.resumed && ["Trainer resumed", plain(state.resumed)],
      ]}
    />
  <//>`;
}

// Title, unit, how a value is shown, and lines: label, metric, colour, dash. Those after `CORE` are drawn if the run has their metric.
const CORE = 6;
const CHARTS = [
  ["Reward", "mean of completions", (v) => fixed(v, 3), [["trained", "reward/train/mean", 1], ["generated", "reward/gen/mean", 2, [4, 3]]]],
  ["Lag", "steps", (v) => fixed(v, 2), [["mean", "staleness/trained/mean", 1], ["max", "staleness/trained/max", 2, [4, 3]]]],
  ["Throughput", "tokens/s", count, [["generated", "throughput/generated/tokens_per_s", 1], ["trained", "throughput/trained/tokens_per_s", 2]]],
  ["Step time", "s", duration, [["step", "time/elapsed_s", 1], ["training", "time/train_s", 2], ["sync", "time/sync_s", 3], ["waiting", "time/wait_s", 4]]],
  ["Length", "tokens per completion", (v) => fixed(v, 1), [["trained", "length/train/mean", 1], ["generated", "length/gen/mean", 2, [4, 3]]]],
  ["Groups without signal", "all rewards equal", (v) => percent(v), [["trained", "reward/train/zero_std_share", 1]]],
  ["Prompts solved", "share of groups", (v) => percent(v), [["by every completion", "solve_rate/train/100", 1], ["by none", "solve_rate/train/0", 2, [4, 3]]]],
  ["Environments", "per rollout", (v) => fixed(v, 2), [["turns", "turns/train/mean", 1], ["tool calls", "tool_calls/train/mean", 2], ["malformed calls", "malformed_calls/train/mean", 3]]],
  ["Loss", "", (v) => short(v), [["loss", "loss/train/sum", 1]]],
  ["Gradient norm", "", (v) => short(v), [["norm", "gradient/train/norm", 1]]],
  ["Entropy", "nats per token", (v) => fixed(v, 3), [["entropy", "entropy/train/mean", 1]]],
  ["KL", "to the reference", (v) => short(v), [["KL", "kl/train/mean", 1]]],
  ["Clipped", "share of tokens", (v) => percent(v, 2), [["below", "clip_low/train/fraction", 1], ["above", "clip_high/train/fraction", 2, [4, 3]]]],
  ["Logprob gap", "trainer to engine, nats", (v) => short(v), [["mean", "logprob_gap/train/mean", 1]]],
  ["MFU", "while training", (v) => percent(v, 1), [["MFU", "mfu/train/compute", 1]]],
];

const linesOf = (columns, lines, bound) =>
  lines.map(([label, key, colour, dash]) => ({ label, values: columns[key], colour: `--line-${colour}`, dash, bound: key.startsWith("staleness") ? bound : undefined }));

const has = (columns, lines) => lines.some(([, key]) => columns[key].some((value) => value !== null));

function Charts({ data, other, bound, rounds }) {
  const drawn = useMemo(
    () =>
      CHARTS.filter(([, , , lines], i) => i < CORE || has(data.columns, lines)).map(([title, unit, show, lines]) => ({
        title,
        unit: title === "Lag" && bound !== undefined ? `steps, ${bound} allowed` : unit,
        show,
        ...laid({ xs: data.steps, lines: linesOf(data.columns, lines, bound) }, other && { name: other.run, xs: other.steps, lines: linesOf(other.columns, lines.slice(0, 1)) }),
      })),
    [data, other, bound],
  );
  const [reward, ...rest] = drawn.map((chart) => html`<${Chart} key=${chart.title} ...${chart} />`);
  return html`<div class="charts">${reward}${rounds.length > 0 && html`<${Passes} key="pass@k" rounds=${rounds} />`}${rest}</div>`;
}

// What holds for all charts: how much they are smoothed, and the run that is laid over this one.
function ChartTools({ against }) {
  const others = useAnswer("v1/console/runs").data?.runs ?? [];
  return html`<div class="chart-tools">
    ${others.length > 0 &&
    html`<span class="sorting"><label for="against">Compare with</label>
      <select id="against" onChange=${(event) => choose({ against: event.target.value })}>
        ${["", ...others].map((name) => html`<option key=${name} value=${name} selected=${name === against}>${name ? plain(name) : "no other run"}</option>`)}
      </select></span>`}
    <${Smoothing} />
  </div>`;
}

export function OverviewPage({ frame, about }) {
  const last = frame ? `${frame.steps.revision}/${frame.steps.count}` : null;
  const series = useAnswer(frame ? `v1/console/series?points=${POINTS}` : "", 0, last);
  const steps = useAnswer(frame ? `v1/console/steps?limit=${RECENT}` : "", 0, last);
  const rounds = useAnswer(frame?.rounds.count ? `v1/console/evaluations?limit=${ROUNDS}` : "", 0, frame && `${frame.rounds.revision}/${frame.rounds.count}`);
  const against = useStore(route).query.get("against") ?? "";
  const other = useAnswer(against && `v1/console/runs/${encodeURIComponent(against)}/series?points=${POINTS}`);
  const unready = waiting("Overview", frame);
  if (unready) return unready;
  const bound = about?.facts["admission.max_staleness"];
  const metrics = steps.data?.steps[0]?.metrics ?? {};
  return html`<${Page} title="Overview">
    <${Notice} frame=${frame} />
    <${Tiles} frame=${frame} about=${about} metrics=${metrics} />
    <${ChartTools} against=${against} />
    ${other.error && html`<p class="fault" role="status">${other.error.message}</p>`}
    <${Answer} of=${series}>${(data) => html`<${Charts} data=${data} other=${other.data} bound=${bound} rounds=${rounds.data?.rounds ?? NONE} />`}<//>
    <div class="columns">
      <${StatePanel} frame=${frame} about=${about} />
      <${Panel} title="Last steps" tools=${html`<a href=${link("steps")}>All steps</a>`}>
        <${Answer} of=${steps}>
          ${(data) => html`<${StepsTable} label="Last steps" steps=${data.steps} bound=${bound} empty=${`No step has been trained yet.${frame.awaited && ` The run is waiting for ${frame.awaited}.`}`} />`}
        <//>
      <//>
    </div>
  <//>`;
}
