// How the run's device time was spent, and its result.
import { useAnswer } from "../api.js";
import { fixed, percent, plain, short } from "../format.js";
import { Answer, Facts, Meter, Page, Panel, Table } from "../parts.js";
import { choose, route, useStore } from "../state.js";
import { html, useMemo } from "../vendor/htm-preact.js";

const HOUR_S = 3600;
const EVERY_S = 30; // the tracker writes the account as often

const sorted = (spent) => Object.entries(spent).sort(([, one], [, other]) => other - one);

function Price({ price }) {
  return html`<span class="sorting"><label for="price">Price of a device-hour</label>
    <input id="price" type="number" min="0" step="any" value=${price || ""} onChange=${(event) => choose({ price: Number(event.target.value) > 0 ? event.target.value : "" })} /></span>`;
}

function Spent({ data, price, entry }) {
  const total = Object.values(data.spent).reduce((sum, seconds) => sum + seconds, 0);
  const columns = [
    { head: "Spent on", cell: ([name]) => plain(name) },
    { head: "Device-hours", num: true, cell: ([, seconds]) => fixed(seconds / HOUR_S, 3) },
    { head: "Share", num: true, cell: ([, seconds]) => percent(seconds / total, 1) },
    { head: "Of the total", cell: ([name, seconds]) => html`<${Meter} value=${seconds} of=${total} label=${`Share of ${plain(name)}`} />` },
    ...(price ? [{ head: "Cost", num: true, cell: ([, seconds]) => short((seconds / HOUR_S) * price) }] : []),
  ];
  const of = (what) => [plain(what), price ? short(((total / HOUR_S) * price) / data.yields[what]) : `${short(total / HOUR_S / data.yields[what])} device-hours`];
  return html`<${Panel} title="Where the time went" note=${`${fixed(total / HOUR_S, 3)} device-hours${price ? `, ${short((total / HOUR_S) * price)} in total` : ""}`} tools=${entry}>
      <${Table} label="Device-hours by outcome" columns=${columns} rows=${sorted(data.spent)} rowKey=${([name]) => name} empty="Nothing has been spent yet." />
      ${!data.divided && html`<p class="note">Generation time is not broken down by outcome, because there is no sample log (samples.keep).</p>`}
    <//>
    <${Panel} title="Cost per unit">
      ${Object.keys(data.yields).length ? html`<${Facts} of=${Object.keys(data.yields).map(of)} />` : !data.note && html`<p class="empty">Nothing has been trained yet.</p>`}
      ${data.note && html`<p class="note">${data.note}</p>`}
    <//>`;
}

export function AccountPage() {
  const answer = useAnswer("v1/console/account", EVERY_S);
  const price = Number(useStore(route).query.get("price")) || 0;
  // Rendered once for each price: an update would set the field back while somebody types.
  const entry = useMemo(() => html`<${Price} price=${price} />`, [price]);
  return html`<${Page} title="Account" lead="How the run's device time was spent.">
    <${Answer} of=${answer}>${(data) => (data.missing ? html`<p class="empty">${data.missing}</p>` : html`<${Spent} data=${data} price=${price} entry=${entry} />`)}<//>
  <//>`;
}
