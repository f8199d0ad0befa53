import { Empty, Page } from "../parts.js";
import { html } from "../vendor/htm-preact.js";

export const MissingPage = ({ path }) =>
  html`<${Page} title="Page not found"><${Empty}>There is no page ${path.join("/")}. <a href="#/">Go to the overview</a><//><//>`;
