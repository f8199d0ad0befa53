// Building blocks of pages. Untrusted text is only ever a text node.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { count, plain, printable, span } from "./format.js";
import { skew } from "./live.js";
import { choose, now, useStore } from "./state.js";

// A page. Its heading takes the focus when the page opens, so that keyboard and screen reader start there.
export function Page({ title, lead, tools, children }) {
  const heading = useRef(null);
  useEffect(() => {
    document.title = `${title} · grpo`;
  }, [title]);
  return html`<div class="page">
    <div class="page-head">
      <h1 tabindex="-1" ref=${heading}>${title}</h1>
      ${tools && html`<div class="tools">${tools}</div>`}
      ${lead && html`<p class="lead">${lead}</p>`}
    </div>
    ${children}
  </div>`;
}

export const Panel = ({ title, note, tools, children, kind = "" }) =>
  html`<section class=${`panel ${kind}`} aria-label=${title}>
    ${title &&
    html`<div class="panel-head">
      <h2>${title}</h2>
      ${note && html`<span class="note">${note}</span>`} ${tools && html`<div class="tools">${tools}</div>`}
    </div>`}
    ${children}
  </section>`;

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

// Shows a response, or that it is loading, or the error. If there is an older response, the error is shown above it.
export function Answer({ of, children }) {
  const { data, error } = of;
  const fault = error && html`<p class="fault" role="status">${error.message}${data ? " The data below is out of date." : ""}</p>`;
  if (!data) return fault || html`<p class="empty" aria-busy="true">Loading …</p>`;
  return html`${fault}${children(data)}`;
}

// A time by the server's clock, in Unix seconds, shown as time elapsed since.
export function Ago({ at, never = "never" }) {
  const here = useStore(now);
  if (!at) return never;
  const when = new Date(at * 1000);
  return html`<time datetime=${when.toISOString()} title=${when.toLocaleString()}>${span(here + skew() - at)} ago</time>`;
}

export const Name = ({ children }) => html`<span class="name">${plain(children)}</span>`;

export const Badge = ({ kind = "", children }) => html`<span class=${`badge ${kind}`}>${children}</span>`;

export const Facts = ({ of }) =>
  html`<dl class="facts">
    ${of
      .filter(Boolean)
      .map(([name, value, title]) => html`<div key=${name}><dt title=${title}>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;

export const Tile = ({ label, value, unit, note, kind = "" }) =>
  html`<div class=${`tile ${kind}`}>
    <dt>${label}</dt>
    <dd><span class="value">${value}</span>${unit && html`<span class="unit"> ${unit}</span>`}<span class="note">${note}</span></dd>
  </div>`;

export function Meter({ value, of, label, kind = "" }) {
  const share = of > 0 ? Math.min(1, Math.max(0, value / of)) : 0;
  return html`<span class=${`meter ${kind}`} role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax=${of} aria-valuenow=${value}
    ><span style=${{ width: `${100 * share}%` }}></span
  ></span>`;
}

// A table that becomes a list of cards on narrow screens. `columns`: {head, cell(row), num, wide, title}.
export function Table({ label, columns, rows, empty, rowKey, current }) {
  if (!rows.length) return html`<${Empty}>${empty}<//>`;
  return html`<table role="table" aria-label=${label}>
    <thead role="rowgroup">
      <tr role="row">
        ${columns.map(
          (column) =>
            html`<th role="columnheader" scope="col" key=${column.head} class=${column.num ? "num" : ""} title=${column.title}>
              ${column.hidden ? html`<span class="unseen">${column.head}</span>` : column.head}
            </th>`,
        )}
      </tr>
    </thead>
    <tbody role="rowgroup">
      ${rows.map(
        (row) =>
          html`<tr role="row" key=${rowKey(row)} class=${current?.(row) ? "current" : ""}>
            ${columns.map(
              (column) =>
                html`<td role="cell" key=${column.head} data-label=${column.head} class=${`${column.num ? "num" : ""} ${column.wide ? "wide" : ""} ${column.whole ? "whole" : ""}`}>
                  <span class="cell">${column.cell(row)}</span>
                </td>`,
            )}
          </tr>`,
      )}
    </tbody>
  </table>`;
}

export const Pager = ({ label, back, next, children }) =>
  html`<nav class="pager" aria-label=${label}>
    <button type="button" disabled=${!back} onClick=${back}>Back</button>
    <span>${children}</span>
    <button type="button" disabled=${!next} onClick=${next}>Next</button>
  </nav>`;

// The pager of a list that is read in pages of `page` rows, of which this one has `shown`; the address keeps the offset.
export function Pages({ label, offset, page, shown, total }) {
  const last = offset + shown;
  if (!offset && last >= total) return null;
  const go = (to) => () => choose({ offset: String(Math.max(0, to) || "") });
  return html`<${Pager} label=${label} back=${offset > 0 && go(offset - page)} next=${last < total && go(offset + page)}>
    ${shown ? `${count(offset + 1)} to ${count(last)}` : "none"} of ${count(total)}<//>`;
}

// Untrusted text, with escapes for characters that cannot be shown.
export const Printable = ({ text }) => printable(text).map((piece, i) => (piece.escape ? html`<span class="escape" key=${i}>${piece.text}</span>` : piece.text));

const FIRST = 4000; // characters of a long text shown at first
const MORE = 20000; // characters added by each press of the button

// Text of a model or a data set, with any characters and of any size. It is shown in parts, and never as markup.
export function Passage({ text, label }) {
  const [shown, setShown] = useState(FIRST);
  useEffect(() => setShown(FIRST), [text]);
  const cut = text.length > shown;
  return html`<div class="passage">
      <pre tabindex=${text.length > 600 ? "0" : undefined} aria-label=${label}><${Printable} text=${cut ? text.slice(0, shown) : text} />${text === "" && html`<span class="escape">empty</span>`}</pre>
    </div>
    ${cut &&
    html`<p class="more">
      ${count(shown)} of ${count(text.length)} characters shown.${" "}
      <button type="button" onClick=${() => setShown(shown + MORE)}>Show ${count(Math.min(MORE, text.length - shown))} more</button>
    </p>`}`;
}
