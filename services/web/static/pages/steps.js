// The trained steps, and one step: its groups, how they are packed, and its metrics.
import { useAnswer } from "../api.js";
import { count, fixed, percent, plain, range, short } from "../format.js";
import { Answer, Badge, Facts, Meter, Page, Pager, Pages, Panel, Table } from "../parts.js";
import { choose, link, route, useStore } from "../state.js";
import { html } from "../vendor/htm-preact.js";
import { StepsTable } from "./steps_table.js";

const PAGE = 25;
const GROUPS = 100;

export function StepsPage({ frame, about }) {
  const { query } = useStore(route);
  const before = query.get("before");
  const again = frame && !before ? `${frame.steps.revision}/${frame.steps.count}` : null;
  const answer = useAnswer(`v1/console/steps?limit=${PAGE}${before ? `&before=${Number(before)}` : ""}`, 0, again);
  return html`<${Page} title="Steps" lead="All trained steps, newest first.">
    <${Answer} of=${answer}>
      ${(found) =>
        html`<${Panel} title="Trained steps" note=${`${count(found.total)} recorded`}>
          <${StepsTable} label="Trained steps" steps=${found.steps} bound=${about?.facts["admission.max_staleness"]} empty="No step has been trained yet: the first one is waiting for its groups." />
          ${(before || found.next !== null) &&
          html`<${Pager} label="Pages of steps" back=${before && (() => history.back())} next=${found.next !== null && (() => choose({ before: String(found.next) }))}>
            ${found.steps.length ? `steps ${found.steps.at(-1).step} to ${found.steps[0].step}` : "none"}
          <//>`}
        <//>`}
    <//>
  <//>`;
}

const spread = (value) => (value ? `${short(value.min)} / ${short(value.mean)} / ${short(value.max)}` : "–");

const GROUP_COLUMNS = [
  { head: "Group", cell: (row) => html`<a href=${link("groups", row.group)}>${row.group}</a>` },
  { head: "Trained", cell: (row) => (row.fresh ? "for the first time" : html`again <span class="note">(${count(row.uses)} uses)</span>`) },
  { head: "Versions", num: true, cell: (row) => range(row.oldest, row.newest) },
  { head: "Lag", num: true, title: "step − oldest version", cell: (row) => count(row.lag) },
  { head: "Weight", num: true, title: "importance weight: factor of its tokens' loss", cell: (row) => short(row.weight) },
  { head: "Advantage", num: true, title: "min / mean / max", cell: (row) => spread(row.advantage) },
  { head: "Completions", num: true, cell: (row) => html`${count(row.responses)}${row.masked > 0 && html` <span class="note">${row.masked} masked</span>`}` },
  { head: "Tokens in the loss", num: true, cell: (row) => count(row.trained_tokens) },
];

const RANK_COLUMNS = [
  { head: "Rank", num: true, cell: (row) => row.rank },
  { head: "Rows", num: true, title: "each is a micro-batch", cell: (row) => row.rows },
  { head: "Empty", num: true, cell: (row) => row.empty },
  { head: "Responses", num: true, cell: (row) => count(row.responses) },
  { head: "Tokens", num: true, cell: (row) => count(row.tokens) },
  { head: "Fill", num: true, title: "share of the token budget used by rows with a response", cell: (row) => percent(row.fill) },
];

function Plan({ plan }) {
  return html`<${Panel} title="Plan">
      <${Facts}
        of=${[
          ["Groups", `${count(plan.size)}: ${count(plan.fresh)} fresh, ${count(plan.size - plan.fresh)} replayed`],
          ["Tokens", `${count(plan.total_tokens)} including prompts, ${count(plan.response_tokens)} in the loss`],
          ["Mini-batches", plan.mini_batch_rows.map((rows, i) => `${rows} rows per rank, denominator ${short(plan.denominators[i])}`).join(", ")],
          ["Advantages", spread(plan.advantage), "min / mean / max"],
          ["Importance weights", spread(plan.weight), "min / mean / max"],
        ]}
      />
      <${Table} label="Ranks" columns=${RANK_COLUMNS} rows=${plan.ranks} rowKey=${(row) => row.rank} empty="No rank has rows." />
    <//>
    <${Panel} title="Groups of the step">
      <${Table} label="Groups of the step" columns=${GROUP_COLUMNS} rows=${plan.groups} rowKey=${(row) => row.group} empty="The step has no groups." />
      <${Pages} label="Pages of groups" offset=${plan.offset} page=${GROUPS} shown=${plan.groups.length} total=${plan.size} />
    <//>`;
}

// The metrics record, grouped by the first part of each name: reward, staleness, time, …
function Metrics({ record }) {
  const groups = new Map();
  for (const [name, value] of Object.entries(record).sort(([a], [b]) => (a < b ? -1 : 1))) {
    if (name.startsWith("histogram/") || name === "step" || name === "time_s" || name.startsWith("run/")) continue;
    const noun = name.split("/")[0];
    groups.set(noun, [...(groups.get(noun) ?? []), [name.slice(noun.length + 1) || noun, value]]);
  }
  return html`<div class="metrics">
    ${[...groups].map(
      ([noun, values]) =>
        html`<section key=${noun} aria-label=${plain(noun)}>
          <h3>${plain(noun)}</h3>
          <dl>${values.map(([name, value]) => html`<div key=${name}><dt>${plain(name)}</dt><dd>${short(value)}</dd></div>`)}</dl>
        </section>`,
    )}
  </div>`;
}

const HISTOGRAMS = [
  ["reward", "Rewards", "rollouts"],
  ["length", "Lengths", "segments"],
  ["advantage", "Advantages", "tokens"],
  ["ratio", "Ratios to the older policy", "tokens"],
  ["logprob_gap", "Logprob gap to the engine", "tokens"],
];

// Bars of a histogram: each bin that is not empty by its upper bound, as wide as its share of the fullest.
function Histogram({ title, of, bins }) {
  const total = bins.reduce((sum, [, number]) => sum + number, 0);
  const most = Math.max(...bins.map(([, number]) => number));
  const columns = [
    { head: "Up to", num: true, cell: ([bound]) => (bound === Infinity ? "any" : String(bound)) },
    { head: "Share", num: true, cell: ([, number]) => percent(number / total, 1) },
    { head: "Relative to the fullest bin", cell: ([bound, number]) => html`<${Meter} value=${number} of=${most} label=${`Up to ${bound}`} />` },
  ];
  return html`<section aria-label=${title}><h3>${title} <span class="unit">${count(total)} ${of}</span></h3>
    <${Table} label=${title} columns=${columns} rows=${bins} rowKey=${([bound]) => bound} empty="" />
  </section>`;
}

function Histograms({ record }) {
  const drawn = HISTOGRAMS.map(([what, title, of]) => {
    const prefix = `histogram/${what}/train/`;
    const bins = Object.entries(record).filter(([name]) => name.startsWith(prefix)).map(([name, number]) => [name.slice(prefix.length) === "inf" ? Infinity : Number(name.slice(prefix.length)), number]);
    return { title, of, bins: bins.sort(([a], [b]) => a - b) };
  }).filter(({ bins }) => bins.length);
  return drawn.length > 0 && html`<${Panel} title="Distributions"><div class="histograms">${drawn.map((one) => html`<${Histogram} key=${one.title} ...${one} />`)}</div><//>`;
}

const STATES = { prepared: ["calm", "planned, not yet trained"], committed: ["good", "trained"], retired: ["calm", "trained; its plan was deleted after a checkpoint"] };

export function StepPage({ path, frame }) {
  const { query } = useStore(route);
  const step = Number(path[1]);
  const asked = Number.isInteger(step) && step >= 0 ? `v1/steps/${step}?limit=${GROUPS}&offset=${Number(query.get("offset")) || 0}` : "";
  const committed = frame?.state ? frame.state.committed_step >= step : null;
  const answer = useAnswer(asked, 0, committed);
  const last = frame?.state?.prepared_step ?? step;
  const tools = html`<a class=${step > 0 ? "" : "off"} href=${step > 0 ? link("steps", step - 1) : undefined}>Previous step</a>
    <a class=${step < last ? "" : "off"} href=${step < last ? link("steps", step + 1) : undefined}>Next step</a>`;
  return html`<${Page} title=${`Step ${plain(path[1])}`} tools=${tools}>
    ${!asked && html`<p class="fault">${plain(path[1])} is not a step number: steps are counted from 0.</p>`}
    ${asked &&
    html`<${Answer} of=${answer}>
      ${(found) => html`<p class="lead"><${Badge} kind=${STATES[found.state][0]}>${found.state}<//> ${STATES[found.state][1]}</p>
        ${found.plan && html`<${Plan} plan=${found.plan} />`}
        ${found.record && html`<${Histograms} record=${found.record} />`}
        <${Panel} title="Metrics" note="explained in docs/metrics.md">
          ${found.record ? html`<${Metrics} record=${found.record} />` : html`<p class="empty">${found.state === "prepared" ? "Available once the step is trained." : "The record was deleted."}</p>`}
        <//>`}
    <//>`}
  <//>`;
}
