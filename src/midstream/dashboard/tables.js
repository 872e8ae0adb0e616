// Tables that are drawn again in place. Owns: their rows, their order, how they are folded and searched.
// Always holds: drawing again takes no focus, no selection and no place of the page away. A key's row stays the same element, and
// the row that has the focus is never moved nor hidden: the others are moved around it.

export const FOLDED = 10;

export const num = (text) => ({ text, as: "number" });
export const long = (text) => ({ text, as: "long" });
export const mood = (text, good) => ({ text, as: good ? "good" : "bad" });
export const named = (text) => ({ text, as: "name" });

// What somebody reads: a turn of the opened trajectory that is on the screen, else the section in its middle.
function read() {
  const seen = [...document.querySelectorAll(".turn")].find((turn) => {
    const { top, bottom } = turn.getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
  });
  return seen ?? document.elementFromPoint(innerWidth / 2, innerHeight / 2)?.closest("section");
}

// Does what changes the page, and leaves what is read at its place on the screen. The browser's own way would hold on to a row
// that goes elsewhere.
export function steady(act) {
  const held = scrollY > 0 ? read() : null;
  const before = held?.getBoundingClientRect().top;
  act();
  const moved = held ? held.getBoundingClientRect().top - before : 0;
  if (moved) scrollBy({ top: moved, behavior: "instant" });
}

function put(cell, content) {
  const { text, as = "", meter } = content && typeof content === "object" ? content : { text: content };
  const told = JSON.stringify([text, as, meter]);
  if (cell.told === told) return;
  cell.told = told;
  cell.className = as;
  if (meter === undefined) {
    cell.textContent = text ?? "–";
    return;
  }
  const bar = cell.querySelector("meter") ?? document.createElement("meter");
  Object.assign(bar, { max: 1, high: 0.9, value: meter });
  bar.setAttribute("aria-label", "KV cache in use");
  cell.replaceChildren(bar, ` ${text}`);
}

const element = (kind, given = {}, ...inner) => {
  const made = Object.assign(document.createElement(kind), given);
  made.append(...inner);
  return made;
};

export class Table {
  // search: whether rows are searched here, by what stands in them.
  constructor(place, heads, empty, { search = true } = {}) {
    Object.assign(this, { place, heads, empty, rows: [], lines: new Map(), whole: false });
    this.query = element("input", { type: "search", autocomplete: "off", spellcheck: false, placeholder: "Search these rows" });
    this.query.setAttribute("aria-label", `Search the rows of ${heads[0]}`);
    this.query.addEventListener("input", () => this.#show());
    this.fold = element("button", { type: "button" });
    this.fold.addEventListener("click", () => { this.whole = !this.whole; this.#show(); });
    this.found = element("span", { className: "note" });
    this.found.setAttribute("role", "status");
    this.tools = element("div", { className: "tools", hidden: true }, ...(search ? [this.query] : []), this.fold, this.found);
    this.nothing = element("p", { className: "note" });
    this.table = element("table", { hidden: true });
    const head = this.table.createTHead().insertRow();
    heads.forEach((text) => head.append(element("th", { textContent: text, scope: "col" })));
    this.body = this.table.createTBody();
    place.replaceChildren(this.tools, this.table, this.nothing);
  }

  // rows: {key, cells, open}: `open` is what a click or Enter does.
  draw(rows) {
    this.rows = rows;
    this.why = undefined;
    steady(() => this.#show());
  }

  // Instead of rows.
  say(why) {
    Object.assign(this, { rows: [], why });
    steady(() => this.#show());
  }

  #show() {
    // What somebody selects, to copy it, stays until it is let go.
    const selected = getSelection();
    if (!selected.isCollapsed && this.body.contains(selected.anchorNode)) return;
    const query = this.query.value.trim().toLowerCase();
    const found = query ? this.rows.filter((row) => row.cells.some((one) => String(one?.text ?? one).toLowerCase().includes(query))) : this.rows;
    const held = this.#held();
    const shown = found.filter((row, at) => this.whole || at < FOLDED || row.key === held?.dataset.key);
    this.#place(shown.map((row) => this.#line(row)), held);
    this.tools.hidden = this.rows.length <= FOLDED;
    this.fold.hidden = found.length <= FOLDED;
    this.fold.textContent = this.whole ? `Show ${FOLDED} rows` : `Show all ${found.length}`;
    this.fold.setAttribute("aria-expanded", String(this.whole));
    this.found.textContent = query ? `${found.length} of ${this.rows.length} rows` : "";
    this.table.hidden = !this.rows.length;
    this.nothing.hidden = this.rows.length > 0;
    this.nothing.textContent = this.why ?? this.empty;
  }

  #held() {
    const active = document.activeElement;
    return this.body.contains(active) ? active.closest("tr") : null;
  }

  #line(row) {
    let line = this.lines.get(row.key);
    if (!line) {
      line = element("tr");
      line.dataset.key = row.key;
      row.cells.forEach((_, at) => { line.insertCell().dataset.head = this.heads[at]; });
      if (row.open) {
        line.className = "link";
        line.tabIndex = 0;
        line.addEventListener("click", () => line.open());
        line.addEventListener("keydown", (event) => event.key === "Enter" && line.open());
      }
      this.lines.set(row.key, line);
    }
    line.open = row.open;
    row.cells.forEach((content, at) => {
      put(line.cells[at], content);
      // A head stands over its numbers.
      this.table.tHead.rows[0].cells[at].className = line.cells[at].className === "number" ? "number" : "";
    });
    return line;
  }

  #place(lines, held) {
    const kept = new Set(lines);
    for (const [key, line] of this.lines) if (!kept.has(line)) { line.remove(); this.lines.delete(key); }
    let next = null;
    for (const line of lines.toReversed()) {
      if (line !== held && (line.parentNode !== this.body || line.nextSibling !== next)) this.body.insertBefore(line, next);
      next = line;
    }
  }
}
