// The sample log: every completion of the run, searched and filtered by the server.
import { useAnswer } from "../../api.js";
import { count, plain, range, short, signed } from "../../format.js";
import { Answer, Badge, Name, Page, Pages, Panel, Table } from "../../parts.js";
import { choose, link, route, useStore } from "../../state.js";
import { html, useMemo } from "../../vendor/htm-preact.js";

export const PAGE = 50;
const LOGGED_S = 10; // the tracker logs a group within about this time, also after the last step
const OUTCOMES = ["trained", "filtered", "stale", "evicted", "failed"];
const KINDS = { trained: "good", filtered: "calm", stale: "warn", evicted: "warn", failed: "bad" };
const SORTS = [["", "newest"], ["reward", "reward"], ["advantage", "advantage"], ["length", "length"], ["step", "step"], ["oldest", "policy version"], ["gap_max", "largest gap"]];
// Fields of the form: name, label, kind, and the condition that a value stands for.
const FIELDS = [
  ["text", "Completion contains", "search", (value) => `${quoted(value)} in completion`],
  ["from", "From step", "number", (value) => `step >= ${Number(value)}`],
  ["to", "To step", "number", (value) => `step <= ${Number(value)}`],
  ["least", "Reward at least", "number", (value) => `reward >= ${Number(value)}`],
  ["most", "Reward at most", "number", (value) => `reward <= ${Number(value)}`],
  ["longer", "Length at least", "number", (value) => `length >= ${Number(value)}`],
  ["version", "Policy version", "number", (value) => `oldest <= ${Number(value)} and newest >= ${Number(value)}`],
  ["source", "Source", "search", (value) => `source == ${quoted(value)}`],
];

// A text as a condition of the search writes it.
export const quoted = (text) => `'${text.replaceAll("'", "''")}'`;

export const keyOf = (row) => [row.payload, row.step, row.outcome, row.sample ?? "", row.incarnation].join("~");

const conditions = (query) => [
  ...FIELDS.filter(([name]) => query.get(name)).map(([name, , , condition]) => condition(query.get(name))),
  ...(query.get("outcome") ? [`outcome == ${quoted(query.get("outcome"))}`] : []),
  ...(query.get("where") ? [`(${query.get("where")})`] : []),
];

function Filters({ query }) {
  const search = (event) => {
    event.preventDefault();
    choose({ ...Object.fromEntries(new FormData(event.currentTarget)), offset: "" });
  };
  const field = ([name, label, kind]) => html`<div class="field" key=${name}>
    <label for=${`filter-${name}`}>${label}</label>
    <input id=${`filter-${name}`} name=${name} type=${kind} step="any" value=${query.get(name) ?? ""} autocomplete="off" spellcheck="false" />
  </div>`;
  return html`<form class="filters" role="search" aria-label="Filter completions" onSubmit=${search} key=${query.toString()}>
    ${FIELDS.map(field)}
    <div class="field">
      <label for="filter-outcome">Outcome</label>
      <select id="filter-outcome" name="outcome">
        ${["", ...OUTCOMES].map((name) => html`<option key=${name} value=${name} selected=${name === (query.get("outcome") ?? "")}>${name || "any"}</option>`)}
      </select>
    </div>
    <div class="field">
      <label for="filter-sort">Sort by</label>
      <select id="filter-sort" name="sort">
        ${SORTS.map(([name, words]) => html`<option key=${name} value=${name} selected=${name === (query.get("sort") ?? "")}>${words}</option>`)}
      </select>
    </div>
    <div class="field">
      <label for="filter-order">Order</label>
      <select id="filter-order" name="reverse">
        ${[["", "default"], ["true", "reversed"]].map(([value, words]) => html`<option key=${value} value=${value} selected=${value === (query.get("reverse") ?? "")}>${words}</option>`)}
      </select>
    </div>
    <div class="field whole">
      <label for="filter-where">Expression</label>
      <input id="filter-where" class="name" name="where" value=${query.get("where") ?? ""} autocomplete="off" spellcheck="false" aria-describedby="where-help" />
      <p class="help" id="where-help">For example score.math > 0 and not truncated, or regexp_matches(completion, '^I')</p>
    </div>
    <div class="buttons"><button type="submit" class="primary">Search</button></div>
  </form>`;
}

export const COLUMNS = [
  { head: "Step", num: true, cell: (row) => html`<a href=${link("steps", row.step)}>${row.step}</a>` },
  { head: "Completion", cell: (row) => html`<a href=${link("samples", keyOf(row))}>${plain(row.group)}${row.sample === null ? "" : `, ${row.sample}`}</a>` },
  { head: "Outcome", cell: (row) => html`<${Badge} kind=${KINDS[row.outcome] ?? "calm"}>${plain(row.outcome)}<//>${row.truncated && html` <${Badge} kind="warn">truncated<//>`}` },
  { head: "Reward", num: true, cell: (row) => short(row.reward) },
  { head: "Advantage", num: true, cell: (row) => signed(row.advantage) },
  { head: "Length", num: true, cell: (row) => count(row.length) },
  { head: "Versions", num: true, cell: (row) => range(row.oldest, row.newest) },
  { head: "Source", cell: (row) => html`<${Name}>${row.source ?? "–"}<//>` },
  { head: "Text", wide: true, cell: (row) => html`<span class="excerpt">${plain(row.completion ?? row.reason)}</span>` },
];

export const pathOf = (query, limit = PAGE) => {
  const asked = new URLSearchParams({ where: conditions(query).join(" and "), sort: query.get("sort") ?? "", reverse: query.get("reverse") || "false", offset: query.get("offset") || "0", limit: String(limit) });
  return `v1/console/samples?${asked}`;
};

function missing(found) {
  const missed = Object.values(found.missed_groups).reduce((sum, groups) => sum + groups, 0);
  return [
    missed > 0 && `${count(missed)} groups are missing from the log, because the tracker was behind or not running.`,
    found.first_step > 0 && `The log begins at step ${found.first_step}.`,
  ].filter(Boolean);
}

export function SamplesPage({ frame }) {
  const { query } = useStore(route);
  const offset = Number(query.get("offset")) || 0;
  const again = frame && !offset ? `${frame.steps.revision}/${frame.steps.count}` : null;
  const answer = useAnswer(pathOf(query), offset ? 0 : LOGGED_S, again);
  // Rendered once for each query: a live update would set its fields back to the query's values while somebody types.
  const filters = useMemo(() => html`<${Panel} title="Filter"><${Filters} query=${query} /><//>`, [query.toString()]);
  return html`<${Page} title="Samples" lead="Every completion of the run, whatever its outcome.">
    ${filters}
    <${Answer} of=${answer}>
      ${(found) => html`<${Panel} title="Completions" note=${`${count(found.total)} of ${count(found.of)}`}>
        ${missing(found).map((text) => html`<p class="banner" key=${text}>${text}</p>`)}
        <${Table} label="Completions" columns=${COLUMNS} rows=${found.rows} rowKey=${keyOf} empty=${found.of ? "No completion matches." : "Nothing is logged yet. The tracker writes completions when their group ends; samples.keep = 0 turns the log off."} />
        <${Pages} label="Pages of completions" offset=${offset} page=${PAGE} shown=${found.rows.length} total=${found.total} />
      <//>`}
    <//>
  <//>`;
}
