// The list of steps, used by the overview and the steps page.
import { Ago, Table } from "../parts.js";
import { count, duration, fixed } from "../format.js";
import { link } from "../state.js";
import { html } from "../vendor/htm-preact.js";

export const StepsTable = ({ steps, label, empty, bound }) =>
  html`<${Table}
    label=${label} rows=${steps} empty=${empty} rowKey=${(row) => row.step}
    columns=${[
      { head: "Step", num: true, cell: (row) => html`<a href=${link("steps", row.step)}>${row.step}</a>` },
      { head: "Reward", num: true, title: "mean ± standard deviation over completions", cell: (row) => html`${fixed(row.metrics["reward/train/mean"], 3)} <span class="note">± ${fixed(row.metrics["reward/train/std"], 2)}</span>` },
      { head: "Lag mean", num: true, title: "step − oldest version, mean weighted by tokens", cell: (row) => fixed(row.metrics["staleness/trained/mean"], 2) },
      { head: "Lag max", num: true, title: bound === undefined ? "" : `${bound} allowed`, cell: (row) => count(row.metrics["staleness/trained/max"]) },
      { head: "Generated tok/s", num: true, cell: (row) => count(row.metrics["throughput/generated/tokens_per_s"]) },
      { head: "Trained tok/s", num: true, cell: (row) => count(row.metrics["throughput/trained/tokens_per_s"]) },
      { head: "Length", num: true, title: "mean completion tokens", cell: (row) => fixed(row.metrics["length/train/mean"], 1) },
      { head: "Took", num: true, title: "since the step before", cell: (row) => duration(row.metrics["time/elapsed_s"]) },
      { head: "When", num: true, cell: (row) => html`<${Ago} at=${row.metrics.time_s} />` },
    ]}
  />`;
