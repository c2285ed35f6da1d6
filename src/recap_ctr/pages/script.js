// On a narrow screen, the rows of a wide table become cards, whose lines need the names of the columns.
for (const table of document.querySelectorAll("main table")) {
  const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
  if (names.length < 4) continue;
  table.classList.add("cards");
  for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, at) => { cell.dataset.label = names[at]; });
}

// Show the text of a mark when the pointer is over it or the keyboard's focus is on it.
const tip = document.getElementById("tip");
const show = (text, x, y) => {
  tip.textContent = text;
  tip.style.display = "block";
  tip.style.left = Math.min(x + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.max(y - 34, 4) + "px";
};
const hide = () => { tip.style.display = "none"; };
for (const mark of document.querySelectorAll("[data-tip]")) {
  mark.querySelector("title")?.remove(); // Otherwise the browser's own tooltip would cover ours.
  mark.setAttribute("aria-label", mark.dataset.tip);
  mark.setAttribute("tabindex", "0");
  mark.addEventListener("pointermove", (event) => show(mark.dataset.tip, event.clientX, event.clientY));
  mark.addEventListener("pointerleave", hide);
  mark.addEventListener("focus", () => {
    const box = mark.getBoundingClientRect();
    show(mark.dataset.tip, box.right, box.top);
  });
  mark.addEventListener("blur", hide);
}

// A link into a folded part opens it, and on paper all parts are open.
const unfold = () => {
  const part = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("details");
  if (part && !part.open) {
    part.open = true;
    part.scrollIntoView();
  }
};
addEventListener("hashchange", unfold);
addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
unfold();
