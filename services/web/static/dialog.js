// Dialogs, and the line that shows their result.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { store, useStore } from "./state.js";

const open = store(null); // {title, text, fields, submit, danger, run}
const said = store(null); // {text, bad}

export const say = (text, bad = false) => said.set({ text, bad });

// Open a dialog. `fields`: {name, label, kind, value, options, help, required, min}. `run(values)` acts and returns the message.
export const askFor = (dialog) => open.set(dialog);

// Act without a dialog, and show the result or the error.
export async function perform(run) {
  try {
    say(await run());
  } catch (error) {
    say(error.message, true);
  }
}

function Field({ field, value, set }) {
  const id = `field-${field.name}`;
  const common = { id, name: field.name, value, required: field.required, "aria-describedby": field.help ? `${id}-help` : undefined };
  const change = (event) => set(event.target.value);
  return html`<div class="field">
    <label for=${id}>${field.label}</label>
    ${field.options
      ? html`<select ...${common} onChange=${change}>
          ${field.options.map(([option, words]) => html`<option key=${option} value=${option} selected=${option === value}>${words}</option>`)}
        </select>`
      : html`<input ...${common} type=${field.kind ?? "text"} min=${field.min} maxlength=${field.most} autocomplete="off" spellcheck="false" onInput=${change} />`}
    ${field.help && html`<p class="help" id=${`${id}-help`}>${field.help}</p>`}
  </div>`;
}

export function Dialogs() {
  const dialog = useStore(open);
  const element = useRef(null);
  const [values, setValues] = useState({});
  const [state, setState] = useState({ busy: false, refusal: "" });
  useEffect(() => {
    if (!dialog) return;
    setValues(Object.fromEntries((dialog.fields ?? []).map((field) => [field.name, field.value ?? ""])));
    setState({ busy: false, refusal: "" });
    if (!element.current.open) element.current.showModal();
  }, [dialog]);
  const submit = async (event) => {
    event.preventDefault();
    setState({ busy: true, refusal: "" });
    const still = () => open.get() === dialog; // it may have been cancelled since, and another opened; the result is shown anyway
    try {
      const words = await dialog.run(values);
      if (still()) element.current.close();
      say(words);
    } catch (error) {
      if (still()) setState({ busy: false, refusal: error.message });
      else say(error.message, true);
    }
  };
  return html`<dialog ref=${element} aria-labelledby="dialog-title" onClose=${() => open.set(null)}>
    ${dialog &&
    html`<form onSubmit=${submit}>
      <h2 id="dialog-title">${dialog.title}</h2>
      ${dialog.text && html`<p>${dialog.text}</p>`}
      ${(dialog.fields ?? []).map(
        (field) =>
          html`<${Field} key=${field.name} field=${field} value=${values[field.name] ?? field.value ?? ""} set=${(value) =>
            setValues({ ...values, [field.name]: value })} />`,
      )}
      <p class="refusal" role="alert">${state.refusal}</p>
      <div class="buttons">
        <button type="button" onClick=${() => element.current.close()}>Cancel</button>
        <button type="submit" class=${dialog.danger ? "danger" : "primary"} disabled=${state.busy}>${dialog.submit}</button>
      </div>
    </form>`}
  </dialog>`;
}

const SHOWN_MS = 8000;

export function Said() {
  const what = useStore(said);
  useEffect(() => {
    if (!what) return undefined;
    const timer = setTimeout(() => said.set(null), SHOWN_MS);
    return () => clearTimeout(timer);
  }, [what]);
  return html`<div class="said" role="status" aria-live="polite">
    ${what && html`<p class=${what.bad ? "bad" : ""}>${what.text} <button type="button" aria-label="Dismiss" onClick=${() => said.set(null)}>×</button></p>`}
  </div>`;
}
