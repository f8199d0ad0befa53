// Runs before the first paint: the theme that was chosen here, else the system's.
(function () {
  let chosen = null;
  try {
    chosen = localStorage.getItem("grpo-theme");
  } catch {
    // storage is switched off: the system's theme it is
  }
  const root = document.documentElement;
  root.dataset.chosen = chosen === "light" || chosen === "dark" ? "yes" : "";
  root.dataset.theme = root.dataset.chosen ? chosen : matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
})();
