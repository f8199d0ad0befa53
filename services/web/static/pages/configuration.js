// The configuration as the services read it: what differs from the defaults, or every key.
import { useAnswer } from "../api.js";
import { count, plain } from "../format.js";
import { Answer, Name, Page, Panel, Table } from "../parts.js";
import { choose, route, useStore } from "../state.js";
import { html } from "../vendor/htm-preact.js";

const COLUMNS = [
  { head: "Key", whole: true, cell: (row) => html`<${Name}>${row.key}<//>` },
  { head: "Value", cell: (row) => html`<${Name}>${JSON.stringify(row.value)}<//>` },
  { head: "Meaning", wide: true, cell: (row) => plain(row.help) },
];

function Shown({ every }) {
  return html`<span class="sorting"><label for="every">Show</label>
    <select id="every" onChange=${(event) => choose({ every: event.target.value })}>
      ${[["", "changed keys only"], ["yes", "every key"]].map(([value, words]) => html`<option key=${value} value=${value} selected=${value === every}>${words}</option>`)}
    </select></span>`;
}

export function ConfigurationPage({ about }) {
  const answer = useAnswer("v1/console/configuration", 0, about); // read again with `about`
  const every = useStore(route).query.get("every") ?? "";
  return html`<${Page} title="Configuration" lead="The configuration as the services of the run read it.">
    <${Answer} of=${answer}>
      ${(data) => {
        const rows = every ? data.keys : data.keys.filter((row) => row.changed);
        return html`<${Panel} title="Keys" note=${`${count(rows.length)} of ${count(data.keys.length)}`} tools=${html`<${Shown} every=${every} />`}>
          <${Table} label="Keys of the configuration" columns=${COLUMNS} rows=${rows} rowKey=${(row) => row.key} empty="Every key has its default value." />
        <//>`;
      }}
    <//>
  <//>`;
}
