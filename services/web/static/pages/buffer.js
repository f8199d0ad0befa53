// The replay table: how full it is, how it is sampled, and its groups.
import { useAnswer } from "../api.js";
import { count, fixed, percent, range, short } from "../format.js";
import { Answer, Meter, Name, Page, Pages, Panel, Table, Tile } from "../parts.js";
import { choose, link, route, useStore } from "../state.js";
import { html } from "../vendor/htm-preact.js";

const PAGE = 50;
const EVERY_S = 2;
const SORTS = [["order", "order of issue"], ["version", "oldest version"], ["weight", "sampling weight"]];

const columns = (weighted) =>
  [
    { head: "Group", cell: (row) => html`<a href=${link("groups", row.group)}>${row.group}</a>` },
    { head: "Issued", num: true, title: "position in the order of issue", cell: (row) => count(row.seq) },
    { head: "Versions", num: true, title: "oldest and newest policy version of its tokens", cell: (row) => (row.readable ? range(row.oldest, row.newest) : "unreadable header") },
    { head: "Lag", num: true, title: "next step to prepare − oldest version", cell: (row) => count(row.lag) },
    { head: "Uses", num: true, cell: (row) => count(row.uses) },
    weighted && { head: "Weight", num: true, cell: (row) => short(row.weight) },
    weighted && { head: "Probability", num: true, title: "weight divided by the sum of weights", cell: (row) => percent(row.probability, 2) },
    { head: "Reward", num: true, cell: (row) => html`${fixed(row.reward_mean, 3)} <span class="note">± ${fixed(row.reward_std, 2)}</span>` },
    { head: "Length", num: true, title: "shortest / mean / longest, tokens", cell: (row) => (row.readable ? `${row.length_min} / ${fixed(row.length_mean, 1)} / ${row.length_max}` : "–") },
    { head: "Source", cell: (row) => html`<${Name}>${row.source}<//>` },
    { head: "Generator", cell: (row) => html`<${Name}>${row.generator}<//>` },
  ].filter(Boolean);

function Sorting({ sort, reverse, weighted }) {
  return html`<span class="sorting">
    <label for="sort">Sort by</label>
    <select id="sort" value=${sort} onChange=${(event) => choose({ sort: event.target.value, offset: "" })}>
      ${SORTS.filter(([name]) => name !== "weight" || weighted).map(([name, words]) => html`<option key=${name} value=${name} selected=${name === sort}>${words}</option>`)}
    </select>
    <button type="button" aria-pressed=${reverse} onClick=${() => choose({ reverse: reverse ? "" : "true", offset: "" })}>Highest first</button>
  </span>`;
}

export function BufferPage() {
  const { query } = useStore(route);
  const [sort, reverse, offset] = [query.get("sort") || "order", query.get("reverse") === "true", Number(query.get("offset")) || 0];
  const answer = useAnswer(`v1/buffer?sort=${encodeURIComponent(sort)}&reverse=${reverse}&offset=${offset}&limit=${PAGE}`, EVERY_S);
  return html`<${Page} title="Buffer" lead="Finished groups in the replay table, waiting to be trained or trained again.">
    <${Answer} of=${answer}>
      ${(found) => {
        const weighted = found.weight_sum !== null;
        const uses = Object.entries(found.uses).map(([times, groups]) => `${count(groups)} used ${times}×`);
        return html`<dl class="tiles">
            <${Tile} label="Groups" value=${count(found.size)} unit=${`of ${count(found.capacity)}`} note=${html`<${Meter} value=${found.size} of=${found.capacity} label="Groups in the table" />`} />
            <${Tile} label="Sampler" value=${found.sampler} note=${`remover ${found.remover}`} />
            <${Tile} label="Uses" value=${found.max_uses || "unlimited"} unit=${found.max_uses ? "max" : ""} note=${uses.join(", ") || "the table is empty"} />
            <${Tile} label="Inserted in total" value=${count(found.inserted)} note=${`${count(found.drawn)} sampled`} />
            <${Tile} label="Next step" value=${found.next_step} note=${weighted ? `sum of weights ${short(found.weight_sum)}` : "lags are relative to it"} />
          </dl>
          <${Panel} title="Groups" tools=${html`<${Sorting} sort=${sort} reverse=${reverse} weighted=${weighted} />`}>
            <${Table} label="Groups of the buffer" columns=${columns(weighted)} rows=${found.groups} rowKey=${(row) => row.group}
              empty=${offset ? "There are no groups on this page." : "The buffer is empty. Groups enter when generators finish them, and leave when a step samples them."} />
            <${Pages} label="Pages of groups" offset=${offset} page=${PAGE} shown=${found.groups.length} total=${found.size} />
          <//>`;
      }}
    <//>
  <//>`;
}
