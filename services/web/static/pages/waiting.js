// What a page that lives on frames shows before the first one.
import { Empty, Page } from "../parts.js";
import { html } from "../vendor/htm-preact.js";

export const waiting = (title, frame) => {
  if (!frame) return html`<${Page} title=${title}><p class="empty" aria-busy="true">Waiting for the server …</p><//>`;
  if (!frame.state)
    return html`<${Page} title=${title}><${Empty}>The run does not exist yet: dataprep makes it when it has read the prompts. This page goes on by itself.<//><//>`;
  return null;
};
