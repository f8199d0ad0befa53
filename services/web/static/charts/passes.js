// The chart of pass@k over evaluation rounds, used by the overview and the evaluation page.
import { fixed, plain } from "../format.js";
import { html, useMemo } from "../vendor/htm-preact.js";
import { Chart } from "./chart.js";

const ALL = "all";
const LINES = 4;

const passes = (round) => Object.keys(round).filter((key) => /^eval\/.+\/pass@\d+$/.test(key));

// "eval/gsm8k/pass@8" -> "gsm8k pass@8"
export const named = (key) => plain(key.replace(/^eval\//, "").replace(/\/(pass@)/, " $1"));

// The metrics of rounds that are pass@k. With a single source, "all" would repeat it and is left out.
export function keysOf(rounds) {
  const keys = [...new Set(rounds.flatMap(passes))].sort();
  const sources = new Set(keys.map((key) => key.split("/").slice(1, -1).join("/")).filter((source) => source !== ALL));
  return sources.size > 1 ? keys : keys.filter((key) => !key.startsWith(`eval/${ALL}/`));
}

// `rounds`: newest first, as the server lists them. Without a pass@k among them there is no chart.
export function Passes({ rounds }) {
  const { xs, lines } = useMemo(() => {
    const oldest = [...rounds].reverse();
    const line = (key, i) => ({ label: named(key), values: oldest.map((round) => round[key] ?? null), colour: `--line-${i + 1}`, dots: true });
    return { xs: oldest.map((round) => round["eval/version"]), lines: keysOf(rounds).slice(0, LINES).map(line) };
  }, [rounds]);
  return lines.length > 0 && html`<${Chart} title="pass@k" unit="share of prompts" x="version" xs=${xs} lines=${lines} show=${(value) => fixed(value, 3)} />`;
}
