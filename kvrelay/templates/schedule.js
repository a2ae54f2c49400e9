// The arrow keys go from cell to cell; the line under the timeline says what is in the cell.
"use strict";
for (const grid of document.querySelectorAll("table.timeline")) {
  const rows = [...grid.tBodies[0].rows].map((row) => [...row.querySelectorAll("td")]);
  const status = grid.closest("section").querySelector(".status");
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  let current = rows[0][0];
  current.tabIndex = 0;
  rows.forEach((row, y) =>
    row.forEach((cell, x) => {
      cell.addEventListener("mouseover", () => (status.textContent = cell.title));
      cell.addEventListener("focus", () => {
        current.tabIndex = -1;
        current = cell;
        cell.tabIndex = 0;
        status.textContent = cell.title;
      });
      cell.addEventListener("keydown", (event) => {
        const move = moves[event.key];
        const next = move && rows[y + move[0]]?.[x + move[1]];
        if (move) event.preventDefault();
        if (next) next.focus();
      });
    }),
  );
}
