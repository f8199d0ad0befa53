// What a page shows before the first frame arrives.
import { Empty, Page } from "../parts.js";
import { html } from "../vendor/htm-preact.js";

export const waiting = (title, frame) => {
  if (!frame) return html`<${Page} title=${title}><p class="empty" aria-busy="true">Waiting for the server …</p><//>`;
  if (!frame.state)
    return html`<${Page} title=${title}><${Empty}>The run does not exist yet. It is waiting for ${frame.awaited}. This page updates automatically.<//><//>`;
  return null;
};
