// What is done to lines before they are drawn: smoothing, and another run's laid over them. Pure.
import { store } from "../state.js";

export const SMOOTHEST = 0.99;

// Weight of the past in a smoothed line, from 0, not smoothed, to below 1. It holds for all charts.
export const smoothing = store(0);

// Exponential moving average, corrected for its start; gaps stay gaps.
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let seen = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    seen += 1;
    return mean / (1 - weight ** seen);
  });
}

// Lines of two runs over the steps of both. Each is {xs, lines}; the other's have another dash and its name.
export function laid(own, other) {
  const lines = (other?.lines ?? []).filter((line) => line.values.some((value) => value !== null));
  if (!lines.length) return own;
  const [xs, ...columns] = window.uPlot.join([
    [own.xs, ...own.lines.map((line) => line.values)],
    [other.xs, ...lines.map((line) => line.values)],
  ]);
  const values = columns.map((column) => Array.from(column, (value) => value ?? null));
  return {
    xs: Array.from(xs),
    lines: [
      ...own.lines.map((line, i) => ({ ...line, values: values[i] })),
      ...lines.map((line, i) => ({ ...line, label: `${other.name}: ${line.label}`, dash: [2, 3], values: values[own.lines.length + i] })),
    ],
  };
}
