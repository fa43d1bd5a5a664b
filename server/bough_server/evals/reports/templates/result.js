"use strict";
// What the page of a result does with its table: sort, filter, search, and unfold. Without it everything is shown.
// Of many cases the first are shown until all are asked for: a browser takes seconds to lay out thousands of rows.
document.documentElement.classList.add("scripted");
document.addEventListener("DOMContentLoaded", () => {
  const table = document.getElementById("cases");
  const tools = document.getElementById("tools");
  const more = document.getElementById("more");
  let rows = Array.from(table.tBodies, (body, index) => ({ body, index, text: "" }));
  const heads = Array.from(table.tHead.rows[0].cells);
  const collator = new Intl.Collator(undefined, { numeric: true });
  let verdict = "";
  let most = 200;
  let shown = [];

  // The trees of a case are a text until a reader looks at them: a browser that runs scripts does not parse <noscript>.
  // It is the page's markup, in which every text is escaped.
  const unfold = (body, isOpen) => {
    const held = body.querySelector("noscript");
    if (held && isOpen) held.parentElement.innerHTML = held.textContent;
    body.classList.toggle("open", isOpen);
    body.querySelector("th a").setAttribute("aria-expanded", String(isOpen));
  };

  const show = ({ body }) => {
    if (body.classList.contains("shown")) return;
    body.classList.add("shown");
    body.querySelector("th a").setAttribute("aria-expanded", String(body.classList.contains("open")));
  };

  const reveal = (id) => {
    const body = document.getElementById((/^case-\d+/.exec(id) || [""])[0]);
    if (!body) return;
    if (!shown.some((row) => row.body === body)) shown.push(rows.find((row) => row.body === body));
    show({ body });
    unfold(body, true);
    const target = document.getElementById(id);
    if (!target) return;
    if (target.tagName === "DETAILS") target.open = true;
    target.scrollIntoView();
  };

  const matches = ({ body, text }, search, label, metric) =>
    (!verdict || body.dataset.verdict.split(" ").includes(verdict)) &&
    (!label || Array.from(body.querySelectorAll(".label"), (one) => one.textContent).includes(label)) &&
    (!metric || /failed|not-scored/.test(body.rows[0].cells[metric].className)) &&
    (!search || text.includes(search));

  const valueOf = (id) => (document.getElementById(id) || { value: "" }).value;

  const filter = () => {
    const [search, label, metric] = [valueOf("search").trim().toLowerCase(), valueOf("label"), valueOf("metric")];
    const matching = rows.filter((row) => {
      if (search && !row.text) row.text = row.body.rows[0].textContent.toLowerCase();
      return matches(row, search, label, metric);
    });
    const count = matching.length;
    const next = new Set(matching.slice(0, most));
    for (const row of shown) if (!next.has(row)) row.body.classList.remove("shown");
    shown = [...next];
    shown.forEach(show);
    document.getElementById("count").textContent = `${count} of ${rows.length} cases`;
    more.hidden = count <= most;
    more.firstElementChild.textContent = `show all ${count} cases`;
  };

  // Ascending, descending, and then as it was; what has no number comes last.
  const sort = (head) => {
    const next = { none: "ascending", ascending: "descending", descending: "none" };
    const order = next[head.getAttribute("aria-sort") || "none"];
    for (const one of heads) one.setAttribute("aria-sort", one === head ? order : "none");
    const sign = order === "descending" ? -1 : 1;
    const keyed = rows.map((row) => {
      const cell = row.body.rows[0].cells[head.cellIndex];
      const number = cell.dataset.order;
      return { row, key: number === undefined ? cell.textContent : number === "" ? null : Number(number) };
    });
    const compare = ({ row: first, key: one }, { row: second, key: other }) => {
      if (order === "none") return first.index - second.index;
      if (one === null || other === null) return (one === null) - (other === null);
      return sign * (typeof one === "number" ? one - other : collator.compare(one, other));
    };
    rows = keyed.sort(compare).map(({ row }) => row);
    table.append(...rows.map(({ body }) => body));
    filter();
  };

  for (const head of heads) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    head.setAttribute("aria-sort", "none");
  }
  more.addEventListener("click", () => {
    most = Infinity;
    filter();
  });
  tools.addEventListener("input", filter);
  tools.addEventListener("submit", (event) => event.preventDefault());
  tools.addEventListener("click", ({ target }) => {
    if (target.dataset.verdict === undefined) return;
    verdict = target.dataset.verdict;
    for (const button of tools.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button === target));
    filter();
  });
  table.addEventListener("click", (event) => {
    const button = event.target.closest("thead button");
    if (button) sort(button.parentElement);
    const link = event.target.closest("tbody th a");
    if (link) {
      event.preventDefault();
      const body = link.closest("tbody");
      unfold(body, !body.classList.contains("open"));
    }
    // The same address again changes nothing, and so is no event.
    const trial = event.target.closest('a[href*="-trial-"]');
    if (trial) reveal(trial.hash.slice(1));
  });
  addEventListener("hashchange", () => reveal(location.hash.slice(1)));
  tools.hidden = false;
  filter();
  reveal(location.hash.slice(1));
});
