// The run at a glance: whether it is healthy, whether it learns, and what it waits for.
import { useAnswer } from "../api.js";
import { Chart } from "../chart.js";
import { count, duration, fixed, percent, plain } from "../format.js";
import { Ago, Answer, Badge, Facts, Meter, Page, Panel, Tile } from "../parts.js";
import { generators, pausedRoles, version } from "../run.js";
import { link } from "../state.js";
import { html, useMemo } from "../vendor/htm-preact.js";
import { StepsTable } from "./steps_table.js";
import { waiting } from "./waiting.js";

const POINTS = 400;
const RECENT = 6;

function Tiles({ frame, about, metrics }) {
  const { state } = frame;
  const bound = about?.facts["admission.max_staleness"];
  const fleet = generators(frame);
  const wanted = state.scale.wanted ?? about?.facts["generator.count"];
  const lag = metrics["staleness/trained/max"];
  const waits = metrics["time/step_s"] - metrics["time/train_s"] - metrics["time/sync_s"];
  return html`<dl class="tiles">
    <${Tile} label="Reward" value=${fixed(metrics["reward/train/mean"], 3)} note=${`± ${fixed(metrics["reward/train/std"], 2)} in step ${frame.steps.last}`} />
    <${Tile} label="Max lag" value=${count(lag)} unit=${bound === undefined ? "" : `of ${bound} allowed`} kind=${lag > bound ? "bad" : ""} note=${`mean ${fixed(metrics["staleness/trained/mean"], 2)} steps`} />
    <${Tile} label="Generated" value=${count(metrics["throughput/generated/tokens_per_s"])} unit="tok/s" note=${`trained ${count(metrics["throughput/trained/tokens_per_s"])} tok/s`} />
    <${Tile} label="Step" value=${duration(metrics["time/step_s"])} note=${`training ${percent(metrics["time/train_s"] / metrics["time/step_s"])}, sync ${percent(metrics["time/sync_s"] / metrics["time/step_s"])}${waits > 0 ? `, waiting ${percent(waits / metrics["time/step_s"])}` : ""}`} />
    <${Tile} label="Slots in use" value=${count(state.slots_used)} unit=${`of ${count(state.slots)}`} note=${html`<${Meter} value=${state.slots_used} of=${state.slots} label="Slots in use" />`} />
    <${Tile} label="Generators working" value=${fleet.atWork} unit=${wanted === undefined ? "" : `of ${wanted} desired`} kind=${fleet.atWork < wanted ? "warn" : ""} note=${`${version(state.published_version)} published`} />
  </dl>`;
}

// What a run that does not train waits for, or why it does not run.
function Notice({ frame }) {
  const { condition, awaited, state } = frame;
  const first = state.committed_step < 0 && !state.ended ? " before its first step" : "";
  const text = awaited ? `The run waits for ${awaited}${first}.` : condition.word === "running" ? "" : `${condition.word}${condition.detail && `: ${condition.detail}`}`;
  return text && html`<p class="banner" role="status">${plain(text)}</p>`;
}

function StatePanel({ frame }) {
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
        state.stopping && ["Stopping", plain(state.stopping)],
        state.finished && ["Finished", plain(state.finished)],
        state.restore >= 0 && ["Restoring", `the checkpoint of step ${state.restore}`],
        ["Steps", `${state.committed_step + 1} trained, ${Math.max(0, state.prepared_step - state.committed_step)} prepared ahead`],
        ["Policy version", version(state.published_version)],
        ["Checkpoint", html`<a href=${link("checkpoints")}>${state.checkpointed_step < 0 ? "none yet" : `step ${state.checkpointed_step}`}</a>${state.checkpoint && ` – another is requested: ${plain(state.checkpoint)}`}`],
        state.checkpoint_failed && ["Checkpoint failed", html`<span class="bad-text">${plain(state.checkpoint_failed)}</span>`],
        state.scale.wanted !== null && ["Desired generators", `${state.scale.wanted}${state.scale.why && ` – ${plain(state.scale.why)}`}`],
        frame.dead_letters > 0 && ["Dead letters", html`<a href=${link("deadletters")}>${count(frame.dead_letters)}</a>`],
        ["Leader of dataprep", state.leader ? plain(state.leader) : "none at present"],
        state.resumed && ["Trainer resumed", plain(state.resumed)],
      ]}
    />
  <//>`;
}

// Charts of the steps' metrics.
function Charts({ data, bound }) {
  const { steps, columns } = data;
  const drawn = useMemo(() => {
    const of = (key) => columns[key];
    return {
      reward: [
        { label: "trained", values: of("reward/train/mean"), colour: "--line-1" },
        { label: "generated", values: of("reward/gen/mean"), colour: "--line-2", dash: [4, 3] },
      ],
      lag: [
        { label: "mean", values: of("staleness/trained/mean"), colour: "--line-1" },
        { label: "max", values: of("staleness/trained/max"), colour: "--line-2", dash: [4, 3], bound },
      ],
      rate: [
        { label: "generated", values: of("throughput/generated/tokens_per_s"), colour: "--line-1" },
        { label: "trained", values: of("throughput/trained/tokens_per_s"), colour: "--line-2" },
      ],
      time: [
        { label: "step", values: of("time/step_s"), colour: "--line-1" },
        { label: "training", values: of("time/train_s"), colour: "--line-2" },
        { label: "sync", values: of("time/sync_s"), colour: "--line-3" },
      ],
      length: [
        { label: "trained", values: of("length/train/mean"), colour: "--line-1" },
        { label: "generated", values: of("length/gen/mean"), colour: "--line-2", dash: [4, 3] },
      ],
      signal: [{ label: "trained", values: of("reward/train/zero_std_share"), colour: "--line-1" }],
    };
  }, [data]);
  return html`<div class="charts">
    <${Chart} title="Reward" unit="mean of completions" xs=${steps} lines=${drawn.reward} show=${(v) => fixed(v, 3)} />
    <${Chart} title="Lag" unit=${`steps${bound === undefined ? "" : `, ${bound} allowed`}`} xs=${steps} lines=${drawn.lag} show=${(v) => fixed(v, 2)} />
    <${Chart} title="Throughput" unit="tokens/s" xs=${steps} lines=${drawn.rate} show=${count} />
    <${Chart} title="Step time" unit="s" xs=${steps} lines=${drawn.time} show=${duration} />
    <${Chart} title="Length" unit="tokens per completion" xs=${steps} lines=${drawn.length} show=${(v) => fixed(v, 1)} />
    <${Chart} title="Groups without signal" unit="all rewards equal" xs=${steps} lines=${drawn.signal} show=${(v) => percent(v)} />
  </div>`;
}

export function OverviewPage({ frame, about }) {
  const last = frame ? `${frame.steps.revision}/${frame.steps.count}` : null;
  const series = useAnswer(frame ? `v1/console/series?points=${POINTS}` : "", 0, last);
  const steps = useAnswer(frame ? `v1/console/steps?limit=${RECENT}` : "", 0, last);
  const unready = waiting("Overview", frame);
  if (unready) return unready;
  const bound = about?.facts["admission.max_staleness"];
  const metrics = steps.data?.steps[0]?.metrics ?? {};
  return html`<${Page} title="Overview">
    <${Notice} frame=${frame} />
    <${Tiles} frame=${frame} about=${about} metrics=${metrics} />
    <${Answer} of=${series}>${(data) => html`<${Charts} data=${data} bound=${bound} />`}<//>
    <div class="columns">
      <${StatePanel} frame=${frame} />
      <${Panel} title="Last steps" tools=${html`<a href=${link("steps")}>All steps</a>`}>
        <${Answer} of=${steps}>
          ${(data) => html`<${StepsTable} label="Last steps" steps=${data.steps} bound=${bound} empty=${`No step has been trained yet.${frame.awaited && ` The run waits for ${frame.awaited}.`}`} />`}
        <//>
      <//>
    </div>
  <//>`;
}
