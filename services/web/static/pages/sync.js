// Weight syncs: the current or last round, its members' acknowledgements, and how long rounds take.
import { useAnswer } from "../api.js";
import { Chart } from "../charts/chart.js";
import { bytes, count, duration, NOTHING, percent, plain } from "../format.js";
import { Answer, Badge, Empty, Facts, Name, Page, Panel, Table } from "../parts.js";
import { version } from "../run.js";
import { html, useMemo } from "../vendor/htm-preact.js";
import { waiting } from "./waiting.js";

const POINTS = 400;
const PHASES = { done: "good", failed: "bad" };

const COLUMNS = [
  { head: "Generator", cell: (row) => html`<${Name}>${row.member}<//>` },
  { head: "Version", num: true, title: "policy version that it holds", cell: (row) => (row.pod ? version(row.pod.version) : NOTHING) },
  { head: "First rank", num: true, title: "in the collective group of the round; the sender is rank 0", cell: (row) => count(row.rank) },
  { head: "Acknowledged", cell: (row) => (row.stage ? html`<${Badge} kind=${row.stage === "failed" ? "bad" : "good"}>${plain(row.stage)}<//>` : html`<span class="note">${row.rank === undefined ? "not in the round" : "nothing yet"}</span>`) },
  { head: "Bytes", num: true, title: "fetched from the store for its current weights", cell: (row) => bytes(row.pod?.weights.bytes) },
  { head: "Pause", num: true, title: "engine pause while its current weights were applied", cell: (row) => duration(row.pod?.weights.pause_s) },
  { head: "Catch-ups", num: true, title: "number of times it fetched weights outside a round", cell: (row) => count(row.pod?.weights.catch_ups) },
  { head: "Detail", wide: true, cell: (row) => html`<${Name}>${row.detail}<//>` },
];

// What the trainer sent last; a trainer that always sends all weights does not say.
function Sent({ pods }) {
  const sent = pods.find((pod) => pod.kind === "trainer" && pod.weights.delta !== undefined)?.weights;
  if (!sent) return NOTHING;
  return html`${bytes(sent.bytes)}, ${percent(sent.share, 2)} of the weights <${Badge}>${sent.delta ? "delta" : "whole"}<//>`;
}

function Round({ round, pods }) {
  if (!round) return html`<${Panel} title="Round"><${Empty}>No round has been opened yet. The first one starts once the trainer has loaded its model, before the first ticket is issued.<//><//>`;
  return html`<${Panel} title=${`Round ${round.attempt}`} note=${`sends ${version(round.version)}`}>
    <${Facts}
      of=${[
        ["Phase", html`<${Badge} kind=${PHASES[round.phase] ?? "warn"}>${plain(round.phase)}<//>`],
        ["Version sent", version(round.version)],
        ["Sent last", html`<${Sent} pods=${pods} />`, "by the trainer: delta, only what changed since the version before; whole, all weights"],
        ["Collective group", `epoch ${round.epoch}, ${round.world_size} ranks over ${plain(round.backend)}`],
        round.port > 0 && ["Rendezvous", html`<${Name}>${`${round.host}:${round.port}`}<//>`],
        ["Trainer", `fence ${round.trainer_fence}`],
      ]}
    />
  <//>`;
}

// All generators, and those of the round that have gone since.
function Generators({ sync, fleet }) {
  const pods = new Map(fleet.pods.filter((pod) => pod.kind === "generator").map((pod) => [`${pod.name}:${pod.boot}`, pod]));
  const said = new Map(sync.acknowledged.map((ack) => [ack.member, ack]));
  const ranks = sync.round?.members ?? {};
  const members = [...new Set([...pods.keys(), ...Object.keys(ranks), ...said.keys()])].sort();
  const rows = members.map((member) => ({ member, rank: ranks[member], pod: pods.get(member), ...said.get(member) }));
  const rest = fleet.total - fleet.pods.length;
  return html`<${Panel} title="Generators">
    <${Table} label="Generators" columns=${COLUMNS} rows=${rows} rowKey=${(row) => row.member} empty="There are no generators." />
    ${rest > 0 && html`<p class="note">${count(rest)} more pods are not shown; grpo inspect sync lists all generators.</p>`}
  <//>`;
}

function Charts({ data }) {
  const drawn = useMemo(
    () => ({
      time: [
        { label: "trainer waits", values: data.columns["time/sync_s"], colour: "--line-1" },
        { label: "last round", values: data.columns["time/transfer_s"], colour: "--line-2" },
      ],
      sent: [
        { label: "bytes sent", values: data.columns["sync/share"], colour: "--line-1" },
        { label: "elements changed", values: data.columns["sync/changed"], colour: "--line-2" },
      ],
      attempts: [
        { label: "attempts", values: data.columns["sync/attempts"], colour: "--line-2" },
        { label: "generators", values: data.columns["fleet/generators"], colour: "--line-1" },
      ],
    }),
    [data],
  );
  return html`<div class="charts">
    <${Chart} title="Sync time" unit="s" xs=${data.steps} lines=${drawn.time} show=${duration} />
    <${Chart} title="Shares of the weights sent and changed" xs=${data.steps} lines=${drawn.sent} show=${(value) => percent(value, 2)} />
    <${Chart} title="Attempts and generators" xs=${data.steps} lines=${drawn.attempts} show=${count} />
  </div>`;
}

export function SyncPage({ frame }) {
  const series = useAnswer(`v1/console/series?points=${POINTS}`, 0, frame ? `${frame.steps.revision}/${frame.steps.count}` : null);
  const unready = waiting("Weight sync", frame);
  if (unready) return unready;
  return html`<${Page} title="Weight sync" lead="After each step, the generators receive the new weights while they generate.">
    <${Round} round=${frame.sync.round} pods=${frame.fleet.pods} />
    <${Generators} sync=${frame.sync} fleet=${frame.fleet} />
    <${Answer} of=${series}>${(data) => html`<${Charts} data=${data} />`}<//>
  <//>`;
}
