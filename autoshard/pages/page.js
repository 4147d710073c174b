"use strict";
for (const field of document.querySelectorAll("input[data-table]")) {
  const rows = Array.from(document.getElementById(field.dataset.table).tBodies[0].rows);
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const count = document.getElementById(field.dataset.count);
  const search = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, i) => {
      row.hidden = !words.every((word) => texts[i].includes(word));
      shown += row.hidden ? 0 : 1;
    });
    count.textContent = `${shown} of ${rows.length} rows`;
  };
  field.addEventListener("input", search);
  search();
}
const unfold = () => {
  const aim = location.hash.length > 1 ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
  for (let at = aim; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  if (aim) aim.scrollIntoView();
};
window.addEventListener("hashchange", unfold);
unfold();
