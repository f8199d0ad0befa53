// Values that many parts of the page read, and the hooks that read them.
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

// The time, once a second, for what is told as "12 s ago".
export const now = store(Date.now() / 1000);
setInterval(() => now.set(Date.now() / 1000), 1000);

// Where the page is: "#/steps/12?sort=weight" -> {path: ["steps", "12"], query}.
const readRoute = () => {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query || "") };
};
export const route = store(readRoute());
addEventListener("hashchange", () => route.set(readRoute()));

export const link = (...path) => `#/${path.map(encodeURIComponent).join("/")}`;

// The same page with other choices, e.g. of a sort.
export const choose = (changes) => {
  const { path, query } = route.get();
  const next = new URLSearchParams(query);
  for (const [name, value] of Object.entries(changes)) value ? next.set(name, value) : next.delete(name);
  location.hash = `/${path.map(encodeURIComponent).join("/")}${next.size ? `?${next}` : ""}`;
};

// Dark or light: what was chosen, else the system's (theme.js).
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
    // storage is switched off: it holds for this page
  }
  show(next);
}
