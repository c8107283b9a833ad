(() => {
const findAll = (what, of = document) => [...of.querySelectorAll(what)];
const findById = (name) => document.getElementById(name);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
document.documentElement.classList.add("js");

const valueOf = (body, nth) => {
  const cell = body.rows[0].cells[nth];
  return cell.dataset.value === undefined ? cell.textContent : parseFloat(cell.dataset.value);
};
const compare = (left, right, sign) => {
  if (typeof left === "number" && typeof right === "number") return sign * (left - right);
  if (typeof left === "number") return -1;
  if (typeof right === "number") return 1;
  return sign * left.localeCompare(right, "en", {numeric: true});
};
const sort = (table, head, nth) => {
  const bodies = [...table.tBodies];
  const isNumber = bodies.some((body) => typeof valueOf(body, nth) === "number");
  const order = head.getAttribute("aria-sort");
  const rises = order ? order === "descending" : !isNumber;
  findAll("th[aria-sort]", table).forEach((sorted) => sorted.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", rises ? "ascending" : "descending");
  const keyed = bodies.map((body) => [valueOf(body, nth), body]);
  keyed.sort((left, right) => compare(left[0], right[0], rises ? 1 : -1));
  table.append(...keyed.map((pair) => pair[1]));
};
const matcher = (text) => {
  const wanted = text.trim().toLowerCase();
  if (!/[*?]/.test(wanted)) return (name) => name.includes(wanted);
  const words = wanted.replace(/[.+^${}()|[\]\\]/g, "\\$&");
  const whole = new RegExp("^" + words.replace(/\*/g, ".*").replace(/\?/g, ".") + "$");
  return (name) => whole.test(name);
};
const filterRows = (name) => {
  const tool = (what) => document.querySelector(`.tools [data-${what}="${name}"]`);
  const [find, part, only] = ["find", "part", "only"].map(tool);
  const fits = matcher(find.value);
  let shown = 0;
  const bodies = [...findById(name).tBodies];
  for (const body of bodies) {
    const isShown = fits(body.rows[0].cells[0].textContent.toLowerCase())
      && (!part || !part.value || body.dataset.part === part.value)
      && (!only || !only.checked || body.dataset.same === undefined);
    body.hidden = !isShown;
    shown += isShown;
  }
  findById(`${name}-count`).textContent = `${shown} of ${bodies.length}`;
};
const addSortButtons = (of) => {
  for (const table of findAll("table[data-sorted]", of)) {
    findAll("thead th", table).forEach((head, nth) => {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => sort(table, head, nth));
    });
  }
};

const showStatus = (room, text) => {
  const status = room.querySelector(":scope > .busy") || document.createElement("p");
  if (!status.isConnected) {
    status.className = "busy";
    status.setAttribute("role", "status");
    room.replaceChildren(status);
  }
  status.textContent = text;
};
const load = async (room, address) => {
  const turn = room.turn = (room.turn || 0) + 1;
  room.setAttribute("aria-busy", "true");
  showStatus(room, "reading");
  for (let wait = 60; ; wait = Math.min(500, 2 * wait)) {
    let answer, text = "server stopped";
    try {
      answer = await fetch(address, {cache: "no-store"});
      text = await answer.text();
    } catch { answer = undefined; }
    if (room.turn !== turn) return;
    if (answer && answer.ok && answer.status !== 202) {
      room.innerHTML = text;
      addSortButtons(room);
    } else showStatus(room, text.trim());
    if (!answer || answer.status !== 202) break;
    await pause(wait);
  }
  room.removeAttribute("aria-busy");
};
const loadOnce = (room, address) => {
  if (room.address === address) return;
  room.address = address;
  load(room, address);
};
const query = (fields) => new URLSearchParams(fields).toString();

const views = findAll("section.view");
let shown = "";
const route = () => {
  let words = [];
  try { words = decodeURIComponent(location.hash.slice(1)).split("/"); } catch { words = [""]; }
  const chosen = views.find((view) => view.id === words[0]) || (shown ? null : views[0]);
  if (!chosen) return;
  for (const view of views) view.hidden = view !== chosen;
  for (const link of findAll("nav a")) {
    if (link.hash === `#${chosen.id}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shown && shown !== chosen.id) {
    const head = chosen.querySelector("h2");
    head.focus({preventScroll: true});
    scrollTo(0, 0);
  }
  shown = chosen.id;
  const of = findById("of"), first = findById("a"), second = findById("b");
  if (shown === "tensors" && of) {
    if (words[1]) of.value = words[1];
    if (of.value) loadOnce(findById("tensors-room"), `tensors?${query({of: of.value})}`);
  }
  if (shown === "compare" && first && words[2]) {
    [first.value, second.value] = [words[1], words[2]];
    if (first.value && second.value) {
      const pair = query({a: first.value, b: second.value});
      loadOnce(findById("compare-room"), `compare?${pair}`);
    }
  }
};

document.addEventListener("click", (event) => {
  const opened = event.target.closest("button.open");
  if (opened) {
    const row = findById(opened.getAttribute("aria-controls")), room = row.querySelector("div");
    row.hidden = !row.hidden;
    opened.setAttribute("aria-expanded", String(!row.hidden));
    if (row.hidden && room.hasAttribute("aria-busy")) {
      room.turn += 1;
      room.removeAttribute("aria-busy");
      room.address = undefined;
    } else if (!row.hidden && room.dataset.load) loadOnce(room, room.dataset.load);
  }
  const verify = event.target.closest("button[data-verify]");
  if (verify) {
    const room = findById("verify-room");
    load(room, `verify?${query({of: verify.dataset.verify})}`);
    room.scrollIntoView({block: "nearest"});
  }
});
const changed = (event) => {
  const data = event.target.dataset || {};
  const name = data.find || data.part || data.only;
  if (name) filterRows(name);
};
document.addEventListener("input", changed);
document.addEventListener("change", (event) => {
  changed(event);
  if (event.target.id === "of") location.hash = `tensors/${event.target.value}`;
});
document.addEventListener("submit", (event) => {
  event.preventDefault();
  const hash = `#compare/${findById("a").value}/${findById("b").value}`;
  if (location.hash === hash) route(); else location.hash = hash;
});
addEventListener("hashchange", route);
// Keep each part as the server sent it, without the elements that this script adds: a newer page
// is compared with the part as sent.
const htmlOf = new Map(findAll("[data-live]").map((part) => [part.id, part.innerHTML]));
addSortButtons(document);
route();

const meta = document.querySelector("meta[name=version]");
if (!meta) return;
let version = meta.content;
const renew = async () => {
  const answer = await fetch("", {cache: "no-store"});
  if (!answer.ok) throw new Error(answer.status);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const old of findAll("[data-live]")) {
    const now = page.getElementById(old.id);
    if (!now || htmlOf.get(old.id) === now.innerHTML) continue;
    htmlOf.set(old.id, now.innerHTML);
    const value = old.value, moved = findAll(".scroll", old).map((box) => box.scrollLeft);
    const focusable = () => findAll("a,button,input,select,.scroll", old);
    const focused = focusable().indexOf(document.activeElement);
    old.innerHTML = now.innerHTML;
    if (old.tagName === "SELECT") old.value = value;
    findAll(".scroll", old).forEach((box, nth) => { box.scrollLeft = moved[nth] || 0; });
    if (focused >= 0) (focusable()[focused] || old).focus({preventScroll: true});
    addSortButtons(old);
  }
  version = page.querySelector("meta[name=version]").content;
};
const status = findById("live");
const poll = async () => {
  try {
    const answer = await fetch("version", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    if ((await answer.text()) !== version) await renew();
    status.textContent = "live";
  } catch { status.textContent = "server stopped: this page shows the last known state"; }
  setTimeout(poll, 1000);
};
setTimeout(poll, 1000);
})();
