// The audit of all tickets: each is in one place or has one outcome.
import { useAnswer } from "../api.js";
import { count, percent, plain } from "../format.js";
import { Answer, Badge, Meter, Page, Panel, Table, Tile } from "../parts.js";
import { html } from "../vendor/htm-preact.js";

const EVERY_S = 2;

const columns = (issued) => [
  { head: "State", cell: (row) => row.words },
  { head: "Groups", num: true, cell: (row) => count(row.count) },
  { head: "Of all issued", num: true, cell: (row) => (issued ? percent(row.count / issued, 1) : "–") },
  { head: "Share", cell: (row) => html`<${Meter} value=${row.count} of=${issued} label=${`${row.words}, share of all issued`} />` },
];

const rows = (counts, words) => Object.entries(counts).map(([name, value]) => ({ name, count: value, words: words?.[name] ?? plain(name.replace("filtered:", "filtered: ").replaceAll("_", " ")) }));

export function LedgerPage({ about }) {
  const answer = useAnswer("v1/audit", EVERY_S);
  return html`<${Page} title="Ledger" lead="At any instant, every ticket is in exactly one place or has exactly one outcome.">
    <${Answer} of=${answer}>
      ${(found) => html`<div class="verdict">
          ${found.messages.length === 0
            ? html`<p><${Badge} kind="good">balanced<//> All ${count(found.issued)} tickets are accounted for, and none was trained twice.</p>`
            : found.messages.map((message) => html`<p key=${message}><${Badge} kind="bad">fault<//> ${plain(message)}</p>`)}
        </div>
        <dl class="tiles">
          <${Tile} label="Issued" value=${count(found.issued)} unit="tickets" note="one per prompt" />
          <${Tile} label="Lost" value=${count(found.lost)} kind=${found.lost ? "bad" : ""} note="issued but not found" />
          <${Tile} label="Duplicated" value=${count(found.doubled)} kind=${found.doubled ? "bad" : ""} note="trained twice in one epoch" />
          <${Tile} label="Slots in use" value=${count(found.slots_used)} kind=${found.slots_used === found.slots_expected ? "" : "bad"} note=${`for ${count(found.slots_expected)} tickets in flight`} />
          <${Tile} label="Late submissions" value=${count(found.refused_submits)} note="refused; not an error" />
        </dl>
        <div class="columns even">
          <${Panel} title="Where tickets are"><${Table} label="Where tickets are" columns=${columns(found.issued)} rows=${rows(found.places, about?.places)} rowKey=${(row) => row.name} empty="" /><//>
          <${Panel} title="How tickets ended"><${Table} label="How tickets ended" columns=${columns(found.issued)} rows=${rows(found.outcomes, about?.outcomes)} rowKey=${(row) => row.name} empty="" /><//>
        </div>`}
    <//>
  <//>`;
}
