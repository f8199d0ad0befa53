// Values shared by many parts of the page, and the hooks to read them.
import { useEffect, useState } from "./vendor/htm-preact.js";

// A value with listeners.
export function store(value) {
  const listeners = new Set();
  return {
    get: () => value,
    set(next) {
      value = next;
      for (const listener of [...listeners]) listener(value);
    },
    listen(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

export function useStore(from) {
  const [value, set] = useState(from.get());
  useEffect(() => {
    set(from.get());
    return from.listen(set);
  }, [from]);
  return value;
}

// The current time, updated once a second, for texts like "12 s ago".
export const now = store(Date.now() / 1000);
setInterval(() => now.set(Date.now() / 1000), 1000);

const decoded = (part) => {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a damaged link: there is no such page
  }
};

// The current route: "#/steps/12?sort=weight" -> {path: ["steps", "12"], query}.
const readRoute = () => {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query || "") };
};

// The token of a link that logs in, "#token=…", or an empty string. It leaves the address, and with it the browser's history.
function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
  if (token) history.replaceState(null, "", `${location.pathname}${location.search}#/`);
  return token;
}

export const tokenOfLink = store(takeToken());

export const route = store(readRoute());
addEventListener("hashchange", () => {
  const token = takeToken(); // such a link was opened in this tab
  route.set(readRoute());
  if (token) tokenOfLink.set(token);
});

export const link = (...path) => `#/${path.map(encodeURIComponent).join("/")}`;

// A link to the sample log, searched: "#/samples?where=…".
export const linkToSamples = (query) => `${link("samples")}?${new URLSearchParams(query)}`;

// Navigate to the same page with other options, e.g. another sort order.
export const choose = (changes) => {
  const { path, query } = route.get();
  const next = new URLSearchParams(query);
  for (const [name, value] of Object.entries(changes)) value ? next.set(name, value) : next.delete(name);
  location.hash = `/${path.map(encodeURIComponent).join("/")}${next.size ? `?${next}` : ""}`;
};

// Dark or light: the user's choice, else the system's (theme.js).
const root = document.documentElement;
export const theme = store(root.dataset.theme);

function show(next) {
  root.dataset.theme = next;
  theme.set(next);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (system) => {
  if (!root.dataset.chosen) show(system.matches ? "dark" : "light");
});

export function switchTheme() {
  const next = theme.get() === "dark" ? "light" : "dark";
  root.dataset.chosen = "yes";
  try {
    localStorage.setItem("grpo-theme", next);
  } catch {
    // storage is disabled: the choice lasts for this page
  }
  show(next);
}
