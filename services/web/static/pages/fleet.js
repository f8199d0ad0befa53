// The pods of the run: phase, policy version and load of each.
import { Action, Operator, scale } from "../actions.js";
import { count, percent, plain } from "../format.js";
import { Ago, Badge, Name, Page, Panel, Table, Tile } from "../parts.js";
import { desired, generators, version } from "../run.js";
import { html } from "../vendor/htm-preact.js";
import { waiting } from "./waiting.js";

const KINDS = { ready: "good", standby: "calm", leading: "good", training: "good", evaluating: "good", draining: "warn", unsynced: "warn" };
const QUIET_S = 3; // an older heartbeat is highlighted

// A gauge, only for pods that report it.
const gauge = (pod, name, show = (value) => count(value)) => (pod.gauges[name] === undefined ? null : show(pod.gauges[name]));

const carried = ({ gauges, kind }) => {
  if (kind !== "generator" || gauges.tickets === undefined) return null;
  return html`${count(gauges.tickets)} <span class="note">of ${count(gauges.limit)}</span>`;
};

function Weights({ pod, published }) {
  const behind = published - pod.version;
  return html`${version(pod.version)} ${pod.version >= 0 && behind > 0 && html`<span class="note">${behind} behind</span>`}`;
}

// What it waits for, such as a service that scores completions, or who requested that it drains, stands beside its phase.
function Phase({ pod }) {
  const note = pod.waiting || pod.draining;
  const kind = pod.waiting ? "warn" : (KINDS[pod.phase] ?? "calm");
  return html`<${Badge} kind=${kind}>${plain(pod.phase)}<//>${note && html`<div class="note name">${plain(note)}</div>`}`;
}

const columns = (frame) => [
  { head: "Pod", cell: (pod) => html`<${Name}>${pod.name}<//>` },
  { head: "Phase", cell: (pod) => html`<${Phase} pod=${pod} />` },
  { head: "Weights", num: true, cell: (pod) => (pod.kind === "generator" ? html`<${Weights} pod=${pod} published=${frame.state.published_version} />` : null) },
  { head: "Groups", num: true, title: "tickets in flight, out of the engine's limit", cell: carried },
  { head: "Running", num: true, title: "completions running in its engine", cell: (pod) => gauge(pod, "running") },
  { head: "Waiting", num: true, title: "completions waiting for its engine", cell: (pod) => gauge(pod, "waiting") },
  { head: "KV cache", num: true, cell: (pod) => gauge(pod, "kv_usage", percent) },
  { head: "Tokens/s", num: true, cell: (pod) => gauge(pod, "tokens_per_s") },
  { head: "Heartbeat", num: true, cell: (pod) => html`<span class=${pod.age_s > QUIET_S ? "warn-text" : ""}><${Ago} at=${frame.at - pod.age_s} /></span>` },
  { head: "Host", cell: (pod) => html`<span class="note">${plain(pod.host)}, pid ${pod.pid}${pod.url && html`, <a href=${pod.url.startsWith("http") ? `${pod.url}/v1/state` : undefined} rel="noreferrer">REST</a>`}</span>` },
];

export function FleetPage({ frame, about }) {
  const unready = waiting("Fleet", frame);
  if (unready) return unready;
  const { fleet, state } = frame;
  const { there, atWork } = generators(frame);
  const wanted = desired(frame, about);
  const held = fleet.versions.map((group) => `${group.pods} × ${version(group.version)}`).join(", ");
  const rest = fleet.total - fleet.pods.length;
  return html`<${Page} title="Fleet" tools=${html`<${Operator}><${Action} disabled=${Boolean(state.finished || state.stopping)} onClick=${() => scale(wanted ?? there, state.scale.most)}>Scale …<//><//>`}>
    <dl class="tiles">
      <${Tile} label="Generators" value=${there} unit=${wanted === undefined ? "" : `of ${wanted} desired`} note=${(wanted !== undefined && plain(state.scale.why)) || `${atWork} working`} />
      <${Tile} label="Weights held" value=${held || "none"} note=${`${version(state.published_version)} published`} />
      <${Tile} label="Generating now" value=${count(fleet.tokens_per_s)} unit="tok/s" note="sum over pods" />
      <${Tile} label="Max generators" value=${state.scale.most === null ? "any number" : state.scale.most} note=${state.scale.most === null ? "no limit known" : "what the machine allows"} />
    </dl>
    <${Panel} title="Pods" note=${`${count(fleet.total)} with a recent heartbeat`}>
      <${Table} label="Pods" columns=${columns(frame)} rows=${fleet.pods} rowKey=${(pod) => pod.name + pod.boot}
        empty="No pod has sent a heartbeat recently: the run's services are down or have not started yet." />
      ${rest > 0 && html`<p class="note">${count(rest)} more not shown; grpo status --json lists them all.</p>`}
    <//>
  <//>`;
}
