// A chart of metrics over steps, which opens large. uPlot draws the plot; this module adds title, legend and text for screen readers.
import { NOTHING } from "../format.js";
import { theme, useStore } from "../state.js";
import { html, useEffect, useMemo, useRef, useState } from "../vendor/htm-preact.js";
import { smoothed, smoothing } from "./lines.js";
import { Smoothing } from "./smoothing.js";

const HEIGHT = 150;
const LARGE = 0.62; // of the window's height
const hovering = window.uPlot?.sync("steps"); // one shared cursor for all charts of a page

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const last = (column) => {
  for (let i = column.length - 1; i >= 0; i -= 1) if (column[i] !== null) return column[i];
  return null;
};

const axisNumber = (value) => (Math.abs(value) >= 1e4 ? `${Number((value / 1000).toPrecision(3))}k` : String(Number(value.toPrecision(6))));

function options(lines, size, x) {
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    ...size,
    legend: { show: false },
    padding: [8, 6, 0, 0],
    cursor: { sync: { key: hovering?.key }, points: { size: 6 }, drag: { x: false, y: false } },
    scales: { x: { time: false, range: (_, low, high) => [low ?? 0, high > low ? high : (low ?? 0) + 1] }, y: { range: (_, low, high) => yRange(lines, low, high) } },
    axes: [
      { ...axis, size: 26, space: 60, values: (_, marks) => marks.map((mark) => (Number.isInteger(mark) ? mark : "")) },
      { ...axis, size: 46, space: 28, values: (_, marks) => marks.map(axisNumber) },
    ],
    series: [
      { label: x },
      ...lines.map((line) => ({
        label: line.label,
        stroke: colour(line.colour),
        width: line.dash ? 1.2 : 1.6,
        dash: line.dash,
        points: { show: line.dots ?? false, size: 4 },
        spanGaps: true,
      })),
    ],
  };
}

// The range starts at 0 if all values are positive and leaves a margin above; a constant line is drawn in the middle.
function yRange(lines, low, high) {
  if (low === null || high === null) return [0, 1];
  const most = Math.max(high, ...lines.map((line) => line.bound ?? -Infinity));
  const room = (most - low || Math.abs(most) || 1) * 0.08;
  return [low >= 0 ? 0 : low - room, most + room];
}

// Draws lines into an element as wide as its container. `setAt` is told the index of the point below the cursor.
function Plot({ label, xs, lines, x, large, setAt }) {
  const place = useRef(null);
  const plot = useRef(null);
  const mode = useStore(theme);
  const shape = lines.map((line) => line.label).join("|") + mode;
  const table = [xs, ...lines.map((line) => line.values)];
  useEffect(() => {
    const size = () => ({ width: Math.max(120, place.current.clientWidth), height: large ? Math.round(innerHeight * LARGE) : HEIGHT });
    const drawn = new window.uPlot({ ...options(lines, size(), x), hooks: { setCursor: [(self) => setAt(self.cursor.idx ?? null)] } }, table, place.current);
    plot.current = drawn;
    const resized = new ResizeObserver(() => drawn.setSize(size()));
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      drawn.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    plot.current?.setData(table);
  }, [xs, lines]);
  return html`<div class="plot" role="img" aria-label=${label} ref=${place}></div>`;
}

function Drawn({ title, unit, xs, lines, show, x, large, tools }) {
  const [at, setAt] = useState(null);
  const shown = at !== null && at < xs.length;
  const words = lines.map((line) => `${line.label} ${show(last(line.values))}`).join(", ");
  return html`<figure class=${`chart ${large ? "large" : ""}`}>
    <figcaption>
      <span class="chart-title">${title}${unit && html`<span class="unit"> ${unit}</span>`}</span>
      <span class="chart-at">${shown ? `${x} ${xs[at]}` : ""}</span>
      ${tools}
      <span class="legend">
        ${lines.map(
          (line) => html`<span class="key" key=${line.label}>
            <i class=${`swatch ${line.dash ? "dashed" : ""}`} data-colour=${line.colour.replace("--line-", "")}></i>${line.label}
            <b>${show(shown ? (line.values[at] ?? null) : last(line.values)) ?? NOTHING}</b>
          </span>`,
        )}
      </span>
    </figcaption>
    ${xs.length
      ? html`<${Plot} label=${`${title}, ${xs.length} points to ${x} ${xs[xs.length - 1]}. Last: ${words}.`} xs=${xs} lines=${lines} x=${x} large=${large} setAt=${setAt} />`
      : html`<p class="empty">No data yet: the first step has not been recorded.</p>`}
  </figure>`;
}

// The same chart over the whole window, until it is closed.
function Enlarged({ chart, close }) {
  const element = useRef(null);
  useEffect(() => element.current.showModal(), []);
  return html`<dialog class="enlarged" ref=${element} aria-label=${chart.title} onClose=${close}>
    <${Drawn} ...${chart} large=${true} />
    <div class="buttons"><${Smoothing} id="smoothing-large" /><button type="button" class="primary" onClick=${() => element.current.close()}>Close</button></div>
  </dialog>`;
}

// `lines`: {label, values, colour, dash, dots, bound}.
export function Chart({ title, unit = "", xs, lines, show, x = "step" }) {
  const [open, setOpen] = useState(false);
  const weight = useStore(smoothing);
  const drawn = useMemo(() => lines.map((line) => ({ ...line, values: smoothed(line.values, weight) })), [lines, weight]);
  const chart = { title, unit: weight ? `${unit}${unit && ", "}smoothed` : unit, xs, lines: drawn, show, x };
  const enlarge = xs.length > 0 && html`<button type="button" class="enlarge" aria-label=${`Enlarge ${title}`} title="Enlarge" onClick=${() => setOpen(true)}>⤢</button>`;
  return html`<${Drawn} ...${chart} tools=${enlarge} />${open && html`<${Enlarged} chart=${chart} close=${() => setOpen(false)} />`}`;
}
