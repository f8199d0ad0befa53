// What a page shows before the first frame arrives, or before the run exists.
import { plain } from "../format.js";
import { Empty, Page } from "../parts.js";
import { told } from "../run.js";
import { html } from "../vendor/htm-preact.js";

export const waiting = (title, frame) => {
  if (!frame) return html`<${Page} title=${title}><p class="empty" aria-busy="true">Waiting for the server …</p><//>`;
  if (frame.state) return null;
  const why = frame.awaited ? `It is waiting for ${frame.awaited}.` : `Its condition is ${told(frame.condition)}.`;
  return html`<${Page} title=${title}><${Empty}>The run does not exist yet. ${plain(why)} This page updates automatically.<//><//>`;
};
