// Tables: sorted by a click on a heading, searched, filtered, and shown 50 rows at a time.
const ROWS_AT_ONCE = 50;

const addTable = (place) => {
  const body = place.querySelector("tbody");
  const controls = place.querySelector(".controls");
  const picturesOfTable = place.querySelector("script.pictures");
  const pictures = picturesOfTable ? JSON.parse(picturesOfTable.textContent) : [];
  const typesetColumns = place.dataset.typeset?.split(" ") ?? [];
  const asWritten = place.querySelector(".as-written");
  let most = ROWS_AT_ONCE;

  // Each image is in the page once; a row gets it when it is shown.
  const addPicture = (row) => {
    for (const image of row.querySelectorAll("img[data-picture]:not([src])")) image.src = pictures[image.dataset.picture];
  };
  const textOf = (row) => [...row.cells].map((cell) => cell.querySelector("div")?.written ?? cell.textContent).join(" ");
  const matches = (row) => {
    if (!controls) return true;
    const words = controls.querySelector("input").value.toLowerCase();
    if (!textOf(row).toLowerCase().includes(words)) return false;
    for (const select of controls.querySelectorAll("select")) {
      if (select.value && row.cells[select.dataset.column].textContent !== select.value) return false;
    }
    return true;
  };
  const update = () => {
    let count = 0;
    for (const row of body.rows) {
      const isMatch = matches(row);
      count += isMatch;
      row.hidden = !isMatch || (controls !== null && count > most);
      if (row.hidden) continue;
      addPicture(row);
      typesetRow(row, typesetColumns, asWritten?.checked ?? false);
    }
    if (!controls) return;
    controls.querySelector("output").value = `${Math.min(most, count)} of ${count} rows`;
    controls.querySelector("button").hidden = count <= most;
  };

  const valueOf = (row, column) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  };
  const compare = (one, other) => {
    if (typeof one === "number" && typeof other === "number") return one - other;
    return String(one).localeCompare(String(other));
  };
  const sortBy = (heading) => {
    const sign = heading.ariaSort === "ascending" ? -1 : 1;
    for (const other of heading.parentElement.cells) other.ariaSort = null;
    heading.ariaSort = sign > 0 ? "ascending" : "descending";
    const column = heading.cellIndex;
    const rows = [...body.rows].sort((one, other) => sign * compare(valueOf(one, column), valueOf(other, column)));
    body.append(...rows);
    update();
  };

  for (const button of place.querySelectorAll("th button")) {
    button.addEventListener("click", () => sortBy(button.parentElement));
  }
  controls?.addEventListener("input", () => {
    most = ROWS_AT_ONCE;
    update();
  });
  controls?.querySelector("button").addEventListener("click", () => {
    most += ROWS_AT_ONCE;
    update();
  });
  update();
};

document.querySelectorAll(".table").forEach(addTable);
