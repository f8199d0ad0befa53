// The checkpoints that the run can resume from or be restored to.
import { Action, Operator, checkpoint, restore } from "../actions.js";
import { useAnswer } from "../api.js";
import { bytes, count, plain } from "../format.js";
import { Ago, Answer, Badge, Name, Page, Panel, Table } from "../parts.js";
import { html } from "../vendor/htm-preact.js";

const EVERY_S = 10;

const columns = [
  { head: "Step", num: true, cell: (row) => row.step },
  {
    head: "State", wide: true,
    cell: (row) => {
      if (!row.complete) return html`<${Badge} kind="calm">unfinished<//> <span class="note">${plain(row.problem)}</span>`;
      if (row.problem) return html`<${Badge} kind="bad">unusable<//> ${plain(row.problem)}`;
      return html`<${Badge} kind="good">complete<//>${row.latest && html` <span class="note">latest: a trainer that starts now loads it</span>`}`;
    },
  },
  { head: "Written", num: true, cell: (row) => html`<${Ago} at=${row.written_s} never="–" />` },
  { head: "Size", num: true, cell: (row) => bytes(row.bytes) },
  { head: "Ranks", num: true, title: "trainer ranks that wrote it; any number can load it", cell: (row) => (row.complete ? `${row.ranks}, ZeRO ${row.zero_stage}` : "–") },
  { head: "Kept until step", num: true, title: "step whose checkpoint replaces it", cell: (row) => (row.complete ? (row.kept_until ?? "the end") : "–") },
  { head: "Restore", hidden: true, num: true, cell: (row) => html`<${Operator}><${Action} disabled=${!row.complete || Boolean(row.problem)} onClick=${() => restore(row.step)}>Restore …<//><//>` },
];

export function CheckpointsPage({ frame }) {
  const state = frame?.state;
  const answer = useAnswer("v1/checkpoints", EVERY_S, `${state?.checkpointed_step} ${state?.checkpoint} ${state?.restore}`);
  return html`<${Page} title="Checkpoints" tools=${html`<${Operator}><${Action} disabled=${!state || Boolean(state.finished)} onClick=${checkpoint}>Write now<//><//>`}>
    ${state?.checkpoint && html`<p class="lead">A checkpoint is requested (${plain(state.checkpoint)}). It will be written when no step is in training.</p>`}
    ${state?.restore_failed && html`<p class="fault">The run could not be restored to the checkpoint of step ${plain(state.restore_failed.replace(" ", ": "))}</p>`}
    ${state?.checkpoint_failed && html`<p class="fault">The last checkpoint could not be written: ${plain(state.checkpoint_failed)}</p>`}
    <${Answer} of=${answer}>
      ${(found) =>
        html`<${Panel} title="In the run's folder" note=${`the last ${count(found.keep)} are kept`}>
          <p class="note"><${Name}>${found.folder}<//></p>
          <${Table} label="Checkpoints" columns=${columns} rows=${[...found.checkpoints].reverse()} rowKey=${(row) => `${row.step}${row.complete}`}
            empty="This server finds no checkpoints in this folder yet." />
          <p class="note">This page does not check for damaged files; grpo checkpoints --verify does.</p>
        <//>`}
    <//>
  <//>`;
}
