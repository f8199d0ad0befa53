// The tokens of a completion, coloured by logprob, gap or advantage; one can be chosen, by pointer or keyboard, to read its figures.
import { count, fixed, plain, signed } from "../../format.js";
import { Printable } from "../../parts.js";
import { html, useEffect, useMemo, useRef, useState } from "../../vendor/htm-preact.js";

const HEATS = [-0.1, -0.5, -1, -2, -4]; // a token of a lower logprob is one shade warmer
const GAPS = [0.001, 0.01, 0.1, 0.5, 2]; // and so is one of a larger gap, in either direction

const SHADES = {
  logprob: ({ logprob }) => `heat-${logprob === null ? 0 : HEATS.filter((bound) => logprob < bound).length}`,
  gap: ({ gap }) => `heat-${gap === null ? 0 : GAPS.filter((bound) => Math.abs(gap) > bound).length}`,
  advantage: (_, advantage) => (advantage > 0 ? "gain" : advantage < 0 ? "loss" : ""),
};
const KEYS = { logprob: [`${HEATS[0]} or more`, "below", HEATS], gap: [`up to ${GAPS[0]}`, "over", GAPS] };

export const BY = [["", "nothing"], ["logprob", "logprob"], ["gap", "gap to the trainer"], ["advantage", "advantage"]];

const figures = (token) => [token.logprob !== null && `logprob ${fixed(token.logprob, 3)}`, token.gap !== null && `gap ${signed(token.gap, 4)}`].filter(Boolean);

// The shades and what each stands for.
export function Legend({ by }) {
  const [close, past, bounds] = KEYS[by] ?? [];
  return bounds && html`<p class="note">${[0, ...bounds].map((bound, i) => html`<span class="span-key" key=${i}><i class=${`swatch heat-${i}`}></i>${i ? `${past} ${bound}` : close}</span>`)}</p>`;
}

// The index of the token nearest to token `from` in the line above (`way` -1) or below (1); of the first or last one if there is none.
function inNextLine(spans, from, way) {
  const { offsetTop: top, offsetLeft: left } = spans[from];
  let at = from + way;
  while (spans[at] && spans[at].offsetTop === top) at += way;
  if (!spans[at]) return way < 0 ? 0 : spans.length - 1;
  const line = spans[at].offsetTop;
  const off = (i) => Math.abs(spans[i].offsetLeft - left);
  while (spans[at + way]?.offsetTop === line && off(at + way) <= off(at)) at += way;
  return at;
}

const MOVES = {
  ArrowLeft: (_, at) => Math.max(0, at - 1),
  ArrowRight: (spans, at) => Math.min(spans.length - 1, at + 1),
  ArrowUp: (spans, at) => inNextLine(spans, Math.max(0, at), -1),
  ArrowDown: (spans, at) => (at < 0 ? 0 : inNextLine(spans, at, 1)),
  Home: () => 0,
  End: (spans) => spans.length - 1,
};

// The figures of the chosen token, read out when another one is chosen.
function Chosen({ token, at }) {
  const words = token && html`Token ${count(at)}: ${token.text ? html`<span class="name">“${plain(token.text)}”</span>` : "part of a character"}, ${figures(token).join(", ") || "no logprob"}`;
  return html`<p class="chosen" aria-live="polite">${words ?? html`<span class="note">Click or tap a token, or use the arrow keys in the text, to see its logprob and gap.</span>`}</p>`;
}

export function Tokens({ tokens, by, advantage }) {
  const place = useRef(null);
  const [at, choose] = useState(-1);
  const spans = useMemo(() => {
    const shade = SHADES[by] ?? (() => "");
    return tokens.map((token, i) => html`<span key=${i} class=${`token ${shade(token, advantage)}`} title=${[`token ${i}`, ...figures(token)].join(", ")}><${Printable} text=${token.text} /></span>`);
  }, [tokens, by, advantage]);
  useEffect(() => {
    const chosen = place.current.children[at];
    chosen?.setAttribute("aria-current", "true");
    chosen?.scrollIntoView({ block: "nearest" });
    return () => chosen?.removeAttribute("aria-current");
  }, [at, tokens]);
  const click = (event) => {
    const token = event.target.closest(".token");
    if (token) choose([...place.current.children].indexOf(token));
  };
  const press = (event) => {
    const move = MOVES[event.key];
    if (!move || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    choose(move(place.current.children, at));
  };
  return html`<div class="passage"><pre tabindex="0" aria-label="Tokens of the completion" ref=${place} onClick=${click} onKeyDown=${press}>${spans}</pre></div>
    <${Chosen} token=${tokens[at]} at=${at} />`;
}
