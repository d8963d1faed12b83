// What the theme adds with scripts gets a name, and scrolling by keyboard.
const mend = () => {
  document.querySelectorAll(".md-code__nav:not([role])").forEach((each) => each.setAttribute("role", "presentation"));
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])").forEach((each) => (each.tabIndex = 0));
};
new MutationObserver(mend).observe(document.documentElement, { childList: true, subtree: true });
