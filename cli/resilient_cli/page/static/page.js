(() => {
const all = (what, of = document) => [...of.querySelectorAll(what)];
const named = (name) => document.getElementById(name);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
document.documentElement.classList.add("js");

const valueOf = (body, nth) => {
  const cell = body.rows[0].cells[nth];
  return cell.dataset.value === undefined ? cell.textContent : parseFloat(cell.dataset.value);
};
const apart = (one, other, turn) => {
  if (typeof one === "number" && typeof other === "number") return turn * (one - other);
  if (typeof one === "number") return -1;
  if (typeof other === "number") return 1;
  return turn * one.localeCompare(other, "en", {numeric: true});
};
const sort = (table, head, nth) => {
  const bodies = [...table.tBodies];
  const isNumber = bodies.some((body) => typeof valueOf(body, nth) === "number");
  const was = head.getAttribute("aria-sort");
  const rises = was ? was === "descending" : !isNumber;
  all("th[aria-sort]", table).forEach((one) => one.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", rises ? "ascending" : "descending");
  const keyed = bodies.map((body) => [valueOf(body, nth), body]);
  keyed.sort((one, other) => apart(one[0], other[0], rises ? 1 : -1));
  table.append(...keyed.map((one) => one[1]));
};
const matcher = (text) => {
  const wanted = text.trim().toLowerCase();
  if (!/[*?]/.test(wanted)) return (name) => name.includes(wanted);
  const words = wanted.replace(/[.+^${}()|[\]\\]/g, "\\$&");
  const whole = new RegExp("^" + words.replace(/\*/g, ".*").replace(/\?/g, ".") + "$");
  return (name) => whole.test(name);
};
const sift = (name) => {
  const tool = (what) => document.querySelector(`.tools [data-${what}="${name}"]`);
  const [find, part, only] = ["find", "part", "only"].map(tool);
  const fits = matcher(find.value);
  let shown = 0;
  const bodies = [...named(name).tBodies];
  for (const body of bodies) {
    const isShown = fits(body.rows[0].cells[0].textContent.toLowerCase())
      && (!part || !part.value || body.dataset.part === part.value)
      && (!only || !only.checked || body.dataset.same === undefined);
    body.hidden = !isShown;
    shown += isShown;
  }
  named(`${name}-count`).textContent = `${shown} of ${bodies.length}`;
};
const ready = (of) => {
  for (const table of all("table[data-sorted]", of)) {
    all("thead th", table).forEach((head, nth) => {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => sort(table, head, nth));
    });
  }
};

const say = (room, text) => {
  const said = room.querySelector(":scope > .busy") || document.createElement("p");
  if (!said.isConnected) {
    said.className = "busy";
    said.setAttribute("role", "status");
    room.replaceChildren(said);
  }
  said.textContent = text;
};
const load = async (room, address) => {
  const turn = room.turn = (room.turn || 0) + 1;
  room.setAttribute("aria-busy", "true");
  say(room, "reading");
  for (let wait = 60; ; wait = Math.min(500, 2 * wait)) {
    let answer, text = "not served any more";
    try {
      answer = await fetch(address, {cache: "no-store"});
      text = await answer.text();
    } catch { answer = undefined; }
    if (room.turn !== turn) return;
    if (answer && answer.ok && answer.status !== 202) {
      room.innerHTML = text;
      ready(room);
    } else say(room, text.trim());
    if (!answer || answer.status !== 202) break;
    await pause(wait);
  }
  room.removeAttribute("aria-busy");
};
const ask = (name, room, address) => {
  if (room.address === address) return;
  room.address = address;
  load(room, address);
};
const query = (fields) => new URLSearchParams(fields).toString();

const views = all("section.view");
let shown = "";
const route = () => {
  let words = [];
  try { words = decodeURIComponent(location.hash.slice(1)).split("/"); } catch { words = [""]; }
  const chosen = views.find((one) => one.id === words[0]) || (shown ? null : views[0]);
  if (!chosen) return;
  for (const one of views) one.hidden = one !== chosen;
  for (const one of all("nav a")) {
    if (one.hash === `#${chosen.id}`) one.setAttribute("aria-current", "page");
    else one.removeAttribute("aria-current");
  }
  if (shown && shown !== chosen.id) {
    const head = chosen.querySelector("h2");
    head.focus({preventScroll: true});
    scrollTo(0, 0);
  }
  shown = chosen.id;
  const of = named("of"), one = named("a"), other = named("b");
  if (shown === "tensors" && of) {
    if (words[1]) of.value = words[1];
    if (of.value) ask("tensors", named("tensors-room"), `tensors?${query({of: of.value})}`);
  }
  if (shown === "compare" && one && words[2]) {
    [one.value, other.value] = [words[1], words[2]];
    if (one.value && other.value) {
      const pair = query({a: one.value, b: other.value});
      ask("compare", named("compare-room"), `compare?${pair}`);
    }
  }
};

document.addEventListener("click", (event) => {
  const opened = event.target.closest("button.open");
  if (opened) {
    const row = named(opened.getAttribute("aria-controls")), room = row.querySelector("div");
    row.hidden = !row.hidden;
    opened.setAttribute("aria-expanded", String(!row.hidden));
    if (row.hidden && room.hasAttribute("aria-busy")) {
      room.turn += 1;
      room.removeAttribute("aria-busy");
      room.address = undefined;
    } else if (!row.hidden && room.dataset.load) ask("detail", room, room.dataset.load);
  }
  const verify = event.target.closest("button[data-verify]");
  if (verify) {
    const room = named("verify-room");
    load(room, `verify?${query({of: verify.dataset.verify})}`);
    room.scrollIntoView({block: "nearest"});
  }
});
const changed = (event) => {
  const data = event.target.dataset || {};
  const name = data.find || data.part || data.only;
  if (name) sift(name);
};
document.addEventListener("input", changed);
document.addEventListener("change", (event) => {
  changed(event);
  if (event.target.id === "of") location.hash = `tensors/${event.target.value}`;
});
document.addEventListener("submit", (event) => {
  event.preventDefault();
  const hash = `#compare/${named("a").value}/${named("b").value}`;
  if (location.hash === hash) route(); else location.hash = hash;
});
addEventListener("hashchange", route);
// As it came: what the script adds is not what a newer page is held against.
const kept = new Map(all("[data-live]").map((one) => [one.id, one.innerHTML]));
ready(document);
route();

const meta = document.querySelector("meta[name=version]");
if (!meta) return;
let version = meta.content;
const renew = async () => {
  const answer = await fetch("", {cache: "no-store"});
  if (!answer.ok) throw new Error(answer.status);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const old of all("[data-live]")) {
    const now = page.getElementById(old.id);
    if (!now || kept.get(old.id) === now.innerHTML) continue;
    kept.set(old.id, now.innerHTML);
    const value = old.value, moved = all(".scroll", old).map((one) => one.scrollLeft);
    const focusable = () => all("a,button,input,select,.scroll", old);
    const focused = focusable().indexOf(document.activeElement);
    old.innerHTML = now.innerHTML;
    if (old.tagName === "SELECT") old.value = value;
    all(".scroll", old).forEach((one, nth) => { one.scrollLeft = moved[nth] || 0; });
    if (focused >= 0) (focusable()[focused] || old).focus({preventScroll: true});
    ready(old);
  }
  version = page.querySelector("meta[name=version]").content;
};
const said = named("live");
const look = async () => {
  try {
    const answer = await fetch("version", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    if ((await answer.text()) !== version) await renew();
    said.textContent = "live";
  } catch { said.textContent = "not served any more: this is the last that was seen"; }
  setTimeout(look, 1000);
};
setTimeout(look, 1000);
})();
