// Runs before the first paint and sets the theme: the user's choice, else the system's.
(function () {
  let chosen = null;
  try {
    chosen = localStorage.getItem("grpo-theme");
  } catch {
    // storage is disabled: use the system's theme
  }
  const root = document.documentElement;
  root.dataset.chosen = chosen === "light" || chosen === "dark" ? "yes" : "";
  root.dataset.theme = root.dataset.chosen ? chosen : matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
})();
