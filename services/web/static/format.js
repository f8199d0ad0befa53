// Formats numbers, durations and untrusted text for people. Pure.

export const NOTHING = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

// 1234567 -> 1,234,567
export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : NOTHING);

// A number with `digits` decimal places.
export const fixed = (value, digits = 2) =>
  known(value)
    ? value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })
    : NOTHING;

// A number of any size in few characters.
export function short(value) {
  if (!known(value)) return NOTHING;
  if (Math.abs(value) < 1e-12) return "0";
  const size = Math.abs(value);
  if (size < 1e12 && (size >= 1e4 || Number.isInteger(value))) return count(value);
  return size < 1e-3 || size >= 1e12 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

export const signed = (value, digits = 3) => (known(value) ? (value > 0 ? "+" : "") + fixed(value, digits).replace("-", "−") : NOTHING);

// 4.2 s, 3:07 min or 2:03:07 h
export function duration(seconds) {
  if (!known(seconds)) return NOTHING;
  if (seconds < 0.1) return `${fixed(seconds * 1000, seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 10) return `${fixed(seconds, 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const two = (part) => String(part).padStart(2, "0");
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  return hours ? `${hours}:${two(minutes)}:${two(rest)} h` : `${minutes}:${two(rest)} min`;
}

// 12 s, 3 min, 5 h or 2 days
export function span(seconds) {
  if (!known(seconds)) return NOTHING;
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function bytes(value) {
  if (!known(value)) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1024 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  return `${power ? fixed(value / 1024 ** power, 1) : count(value)} ${units[power]}`;
}

export const percent = (share, digits = 0) => (known(share) ? `${fixed(100 * share, digits)}\u00a0%` : NOTHING);

export const range = (first, last) => (!known(first) || !known(last) ? NOTHING : first === last ? `${first}` : `${first}–${last}`);

// Characters that control a terminal, are invisible or change the direction of text, except line feeds.
const UNPRINTABLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]+/gu;
const SHOWN = { "\r": "\\r", "\t": "\\t", "\x1b": "\\e" };

const escaped = (character) => {
  const code = character.codePointAt(0);
  return SHOWN[character] ?? (code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u{${code.toString(16)}}`);
};

// Split text into pieces [{text, escape}], with non-printable characters as escapes.
export function printable(text) {
  const pieces = [];
  const add = (piece, escape) => {
    if (piece) pieces.push({ text: piece, escape });
  };
  let from = 0;
  for (const found of text.matchAll(UNPRINTABLE)) {
    add(text.slice(from, found.index), false);
    for (const run of found[0].split(/(\n+)/)) {
      if (run.startsWith("\n")) add(run, false);
      else add(Array.from(run, escaped).join(""), true);
    }
    from = found.index + found[0].length;
  }
  add(text.slice(from), false);
  return pieces;
}

// The same text on one line, for names and reasons.
export const plain = (text) =>
  printable(String(text ?? ""))
    .map((piece) => piece.text.replaceAll("\n", "\\n"))
    .join("");
