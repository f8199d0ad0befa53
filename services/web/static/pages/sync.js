// Weight syncs: the current or last round, its members' acknowledgements, and how long rounds take.
import { useAnswer } from "../api.js";
import { Chart } from "../charts/chart.js";
import { bytes, count, duration, percent, plain } from "../format.js";
import { Answer, Badge, Empty, Facts, Name, Page, Panel, Table } from "../parts.js";
import { version } from "../run.js";
import { html, useMemo } from "../vendor/htm-preact.js";
import { waiting } from "./waiting.js";

const POINTS = 400;
const PHASES = { done: "good", failed: "bad" };

const MEMBER_COLUMNS = [
  { head: "Member", cell: (row) => html`<${Name}>${row.member}<//>` },
  { head: "First rank", num: true, title: "in the collective group; the sender is rank 0", cell: (row) => count(row.rank) },
  { head: "Acknowledged", cell: (row) => (row.stage ? html`<${Badge} kind=${row.stage === "failed" ? "bad" : "good"}>${plain(row.stage)}<//>` : html`<span class="note">nothing yet</span>`) },
  { head: "Bytes", num: true, title: "that its last weights took from the store", cell: (row) => bytes(row.weights?.bytes) },
  { head: "Pause", num: true, title: "to apply its last weights", cell: (row) => duration(row.weights?.pause_s) },
  { head: "Catch-ups", num: true, title: "times that it fetched weights outside rounds", cell: (row) => count(row.weights?.catch_ups) },
  { head: "Detail", wide: true, cell: (row) => html`<${Name}>${row.detail}<//>` },
];

function Round({ sync, pods }) {
  const { round, acknowledged } = sync;
  if (!round) return html`<${Panel} title="Round"><${Empty}>No round has been opened yet. The first one starts when the trainer has loaded, before the first ticket is issued.<//><//>`;
  const said = new Map(acknowledged.map((ack) => [ack.member, ack]));
  const members = new Set([...Object.keys(round.members), ...said.keys()]);
  const took = new Map(pods.map((pod) => [`${pod.name}:${pod.boot}`, pod.weights]));
  const rows = [...members].sort().map((member) => ({ member, rank: round.members[member], weights: took.get(member), ...said.get(member) }));
  return html`<${Panel} title=${`Round ${round.attempt}`} note=${`sends ${version(round.version)}`}>
    <${Facts}
      of=${[
        ["Phase", html`<${Badge} kind=${PHASES[round.phase] ?? "warn"}>${plain(round.phase)}<//>`],
        ["Version sent", version(round.version)],
        ["Collective group", `epoch ${round.epoch}, ${round.world_size} ranks over ${plain(round.backend)}`],
        round.port > 0 && ["Meets at", html`<${Name}>${`${round.host}:${round.port}`}<//>`],
        ["Trainer", `fence ${round.trainer_fence}`],
      ]}
    />
    <${Table} label="Members of the round" columns=${MEMBER_COLUMNS} rows=${rows} rowKey=${(row) => row.member} empty="The round has no members: no generator holds older weights, or there are no generators." />
  <//>`;
}

function Charts({ data }) {
  const drawn = useMemo(
    () => ({
      time: [
        { label: "sync", values: data.columns["time/sync_s"], colour: "--line-1" },
        { label: "transfer", values: data.columns["time/transfer_s"], colour: "--line-2" },
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
    <${Round} sync=${frame.sync} pods=${frame.fleet.pods} />
    <${Answer} of=${series}>${(data) => html`<${Charts} data=${data} />`}<//>
  <//>`;
}
