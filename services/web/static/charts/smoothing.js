// The slider that smooths all charts.
import { useStore } from "../state.js";
import { html } from "../vendor/htm-preact.js";
import { SMOOTHEST, smoothing } from "./lines.js";

export function Smoothing({ id = "smoothing" }) {
  const weight = useStore(smoothing);
  return html`<span class="sorting"><label for=${id}>Smoothing</label>
    <input id=${id} type="range" min="0" max=${SMOOTHEST} step="0.01" value=${weight} aria-valuetext=${weight ? String(weight) : "none"} onInput=${(event) => smoothing.set(Number(event.target.value))} />
    <output for=${id}>${weight ? weight.toFixed(2) : "none"}</output></span>`;
}
