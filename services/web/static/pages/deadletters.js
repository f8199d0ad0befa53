// Tickets that failed permanently, why, and how to requeue them.
import { Action, Operator, requeue, requeueAll } from "../actions.js";
import { useAnswer } from "../api.js";
import { bytes, count, plain } from "../format.js";
import { Ago, Badge, Facts, Name, Page, Pager, Panel, Passage, Table } from "../parts.js";
import { Answer } from "../parts.js";
import { choose, link, route, useStore } from "../state.js";
import { html, useState } from "../vendor/htm-preact.js";

const PAGE = 50;

const at = (row) => Date.parse(row.at) / 1000;

const columns = (put) => [
  { head: "When", cell: (row) => html`<a href=${link("deadletters", row.id)}><${Ago} at=${at(row)} /></a>` },
  { head: "Ticket", cell: (row) => (/^\d+-\d+$/.test(row.ticket) ? html`<a href=${link("groups", row.ticket)}>${row.ticket}</a>` : html`<${Name}>${row.ticket}<//>`) },
  { head: "Reason", wide: true, cell: (row) => html`<${Name}>${row.reason}<//>` },
  { head: "Counted as failed", cell: (row) => (row.failed ? "yes" : html`<span class="note">no: never issued</span>`) },
  { head: "Requeue", hidden: true, num: true, cell: (row) => html`<${Operator}><${Action} disabled=${!row.failed} onClick=${() => put(row.id)}>Requeue<//><//>` },
];

export function DeadLettersPage({ frame }) {
  const { query } = useStore(route);
  const [done, setDone] = useState(0);
  const before = query.get("before") ?? "";
  const answer = useAnswer(`v1/deadletters?limit=${PAGE}&before=${encodeURIComponent(before)}`, 0, `${frame?.dead_letters} ${done}`);
  const again = () => setDone(done + 1);
  return html`<${Page} title="Dead letters" lead="Tickets that failed permanently, each with its reason. A requeued ticket is issued again with the next free slot."
    tools=${answer.data?.total > 0 && html`<${Operator}><${Action} onClick=${() => requeueAll(answer.data.total, again)}>Requeue all …<//><//>`}>
    <${Answer} of=${answer}>
      ${(found) =>
        html`<${Panel} title="Letters" note=${`${count(found.total)} kept, newest first`}>
          <${Table} label="Dead letters" columns=${columns((id) => requeue(id, again))} rows=${found.letters} rowKey=${(row) => row.id}
            empty=${before ? "There are no older dead letters." : "No ticket has failed permanently."} />
          ${(before || found.next) && html`<${Pager} label="Pages of dead letters" back=${before && (() => history.back())} next=${found.next && (() => choose({ before: found.next }))}>of ${count(found.total)}<//>`}
        <//>`}
    <//>
  <//>`;
}

const words = (value) => (typeof value === "string" ? value : JSON.stringify(value));

export function DeadLetterPage({ path }) {
  const [done, setDone] = useState(0);
  const answer = useAnswer(`v1/deadletters/${encodeURIComponent(path[1])}`, 0, done);
  return html`<${Page} title=${`Dead letter ${plain(path[1])}`}
    tools=${answer.data?.failed && html`<${Operator}><${Action} onClick=${() => requeue(path[1], () => setDone(done + 1))}>Requeue<//><//>`}>
    <${Answer} of=${answer}>
      ${(found) => html`<${Panel} title="Details">
          <${Facts}
            of=${[
              ["When", html`<${Ago} at=${at(found)} />`],
              ["Ticket", html`<${Name}>${found.ticket}<//>`],
              ["Counted as failed", found.failed ? html`<${Badge} kind="warn">yes<//>` : "no: its ticket was never issued, so it cannot be requeued"],
              ["Reason", html`<${Name}>${found.reason}<//>`],
              ["Body", `${found.kind}, ${bytes(found.body_bytes)}`],
            ]}
          />
        <//>
        <${Panel} title=${`Fields of the ${found.kind}`}>
          ${found.fields
            ? html`<dl class="fields">${Object.entries(found.fields).map(([name, value]) => html`<div key=${name}><dt>${plain(name)}</dt><dd><${Passage} label=${plain(name)} text=${words(value)} /></dd></div>`)}</dl>`
            : html`<p class="note">The body is neither a ticket nor a header. Its bytes in hexadecimal:</p><${Passage} label="Body" text=${found.hex ?? ""} />`}
        <//>`}
    <//>
  <//>`;
}
