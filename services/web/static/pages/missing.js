import { Empty, Page } from "../parts.js";
import { html } from "../vendor/htm-preact.js";

export const MissingPage = ({ path }) =>
  html`<${Page} title="No such page"><${Empty}>There is no page ${path.join("/")} here. <a href="#/">To the overview</a><//><//>`;
