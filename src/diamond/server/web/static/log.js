// The log of a task: some hundreds of its lines, whichever the reader is at, out of any number.
//
// Lines come from the server by number; what is scrolled out of sight far enough leaves the page again. Long lines come
// shortened. The page's own stream (live.js) says when to look for more. Text becomes text, never markup.
const card = document.querySelector("#log");
const box = document.querySelector("#log-lines");
const [PIECE, MOST, NEAR_PX] = [200, 1000, 400];

const view = { attempt: Number(card.dataset.attempt), pinned: Number(card.dataset.attempt) > 0, first: 1, last: 0, total: 0, over: false, follow: false };
const search = { text: "", lines: [], at: -1, more: false };

async function ask(path, fields) {
  const query = new URLSearchParams(fields);
  if (view.attempt) query.set("attempt", view.attempt);
  const answer = await fetch(`${card.dataset.address}${path}?${query}`).catch(() => null);
  return answer?.ok ? answer.json() : null;
}

// ---- Lines ----------------------------------------------------------------------------------------------------------

function rowOf([number, text, offset, whole], colours) {
  const row = document.createElement("div");
  row.className = "line";
  row.dataset.n = number;
  const body = document.createElement("span");
  for (const [piece, looks] of coloured(text, colours)) addText(body, piece, looks);
  row.append(body);
  if (whole) {
    const link = document.createElement("a");
    link.className = "cut";
    link.href = `/api/v1/tasks/${card.dataset.address.split("/")[2]}/logs?attempt=${view.attempt}&offset=${offset}&limit=${Math.min(whole, 8 * 1024 * 1024)}`;
    link.download = `line-${number}.txt`;
    link.textContent = `… this line has ${whole.toLocaleString()} bytes`;
    body.append(link);
  }
  if (number === search.lines[search.at]) row.classList.add("here");
  return row;
}

function addText(body, text, looks) {
  const holder = looks.names.length || looks.fore || looks.back ? document.createElement("span") : body;
  if (holder !== body) {
    holder.className = looks.names.join(" ");
    if (looks.fore) holder.style.color = looks.fore;
    if (looks.back) holder.style.backgroundColor = looks.back;
    body.append(holder);
  }
  if (!search.text) return holder.append(text);
  const wanted = search.text.toLowerCase(), low = text.toLowerCase();
  let begin = 0;
  // Letters that change their length with their case would shift what is marked.
  for (let at = low.length === text.length ? low.indexOf(wanted) : -1; at >= 0; at = low.indexOf(wanted, begin)) {
    const mark = document.createElement("mark");
    mark.textContent = text.slice(at, at + wanted.length);
    holder.append(text.slice(begin, at), mark);
    begin = at + wanted.length;
  }
  holder.append(text.slice(begin));
}

// Pieces of a line with how they look; `colours` goes on from line to line, as in a terminal.
function coloured(text, colours) {
  const pieces = [];
  let begin = 0;
  for (const found of text.matchAll(/\x1b\[([0-9;:]*)m/g)) {
    if (found.index > begin) pieces.push([text.slice(begin, found.index), looksOf(colours)]);
    apply(found[1].split(/[;:]/).map(Number), colours);
    begin = found.index + found[0].length;
  }
  // The beginning of an order whose rest was cut off is no text.
  const rest = text.slice(begin).replace(/\x1b(\[[0-9;:]*)?$/, "");
  if (rest) pieces.push([rest, looksOf(colours)]);
  return pieces;
}

function apply(codes, colours) {
  for (let at = 0; at < codes.length; at += 1) {
    const code = codes[at];
    if (code === 0) { for (const key of Object.keys(colours)) delete colours[key]; }
    else if ([1, 2, 3, 4, 9].includes(code)) colours[`s${code}`] = true;
    else if (code === 22) { delete colours.s1; delete colours.s2; }
    else if ([23, 24, 29].includes(code)) delete colours[`s${code - 20}`];
    else if (code >= 30 && code <= 37) colours.fore = code - 30;
    else if (code >= 90 && code <= 97) colours.fore = code - 90;
    else if (code >= 40 && code <= 47) colours.back = code - 40;
    else if (code >= 100 && code <= 107) colours.back = code - 100;
    else if (code === 39) delete colours.fore;
    else if (code === 49) delete colours.back;
    else if (code === 38 || code === 48) {
      const kind = codes[at + 1], side = code === 38 ? "fore" : "back";
      if (kind === 5) { colours[side] = of256(codes[at + 2]); at += 2; }
      else if (kind === 2) { colours[side] = rgb(codes.slice(at + 2, at + 5)); at += 4; }
    }
  }
}

function of256(number) {
  if (!(number >= 0 && number < 256)) return undefined;
  if (number < 16) return number % 8;
  if (number >= 232) return rgb(Array(3).fill(8 + 10 * (number - 232)));
  const step = (each) => (each ? 55 + 40 * each : 0), at = number - 16;
  return rgb([step(Math.floor(at / 36)), step(Math.floor(at / 6) % 6), step(at % 6)]);
}
const rgb = (parts) => (parts.length === 3 && parts.every((each) => each >= 0 && each < 256) ? parts : undefined);

// A program does not know what colour the page has: its own colours are moved towards the text's until they can be read.
const parts = (text) => text.match(/[\d.]+/g).slice(0, 3).map(Number);
function brightness(colour) {
  const [red, green, blue] = colour.map((each) => (each / 255 <= 0.04045 ? each / 255 / 12.92 : ((each / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
function contrast(one, other) {
  const [low, high] = [brightness(one), brightness(other)].sort((left, right) => left - right);
  return (high + 0.05) / (low + 0.05);
}
function readable(colour, paper) {
  const aim = brightness(paper) > 0.18 ? [0, 0, 0] : [255, 255, 255];
  let shown = colour;
  for (let step = 1; step <= 10 && contrast(shown, paper) < 4.6; step += 1) {
    shown = colour.map((each, at) => Math.round(each + ((aim[at] - each) * step) / 10));
  }
  return `rgb(${shown.join(" ")})`;
}

function looksOf(colours) {
  const names = Object.keys(colours).filter((key) => key.startsWith("s"));
  if (typeof colours.fore === "number") names.push(`f${colours.fore}`);
  if (typeof colours.back === "number") names.push(`b${colours.back}`);
  const own = (side) => (Array.isArray(colours[side]) ? colours[side] : null);
  const back = own("back");
  const paper = back ?? parts(getComputedStyle(box).backgroundColor);
  // On a background of its own, the page's colour of text may be invisible.
  const fore = own("fore") ?? (back ? [128, 128, 128] : null);
  return { names, fore: fore ? readable(fore, paper) : "", back: back ? `rgb(${back.join(" ")})` : "" };
}

// ---- Which lines ----------------------------------------------------------------------------------------------------

function fragment(lines) {
  const made = document.createDocumentFragment(), colours = {};
  for (const each of lines) made.append(rowOf(each, colours));
  return made;
}

function note(answer) {
  view.total = answer.total;
  view.over = answer.over;
  if (!view.attempt || !view.pinned) view.attempt = answer.attempt;
  offer(answer.newest);
  const foot = document.querySelector("#log-foot");
  const size = answer.bytes >= 1048576 ? `${(answer.bytes / 1048576).toFixed(1)} MiB` : `${(answer.bytes / 1024).toFixed(1)} KiB`;
  const words = answer.total === 1 ? "1 line" : `${answer.total.toLocaleString()} lines, ${size}`;
  foot.textContent = answer.total ? words : answer.over ? "The log is empty." : "Nothing has been written yet.";
}

// Attempts that began since the page was made.
function offer(newest) {
  const select = document.querySelector("#attempt");
  while (select.options.length - 1 < newest) select.append(new Option(String(select.options.length)));
  select.form.hidden = newest < 2;
}

async function show(first) {
  const answer = await ask("", first === null ? { count: PIECE } : { first, count: PIECE });
  if (!answer) return false;
  note(answer);
  box.replaceChildren(fragment(answer.lines));
  view.first = answer.lines[0]?.[0] ?? 1;
  view.last = answer.lines.at(-1)?.[0] ?? 0;
  return true;
}

async function before() {
  if (view.first <= 1) return;
  const first = Math.max(1, view.first - PIECE);
  const answer = await ask("", { first, count: view.first - first });
  if (!answer?.lines.length) return;
  note(answer);
  // Very long lines come in fewer at a time: only what joins on can be put in front.
  if (answer.lines.at(-1)[0] !== view.first - 1) return;
  const height = box.scrollHeight, top = box.scrollTop;
  box.prepend(fragment(answer.lines));
  const gained = box.scrollHeight - height;
  view.first = answer.lines[0][0];
  while (box.children.length > MOST) box.lastElementChild.remove();
  view.last = Number(box.lastElementChild.dataset.n);
  box.scrollTop = top + gained;
}

async function after() {
  // The last line may have grown since it was shown.
  const answer = await ask("", { first: Math.max(1, view.last), count: PIECE });
  if (!answer) return;
  note(answer);
  if (!answer.lines.length) return;
  const top = box.scrollTop;
  if (box.lastElementChild && Number(box.lastElementChild.dataset.n) === answer.lines[0][0]) box.lastElementChild.remove();
  box.append(fragment(answer.lines));
  view.last = answer.lines.at(-1)[0];
  let gone = 0;
  while (box.children.length > MOST) { gone += box.firstElementChild.offsetHeight; box.firstElementChild.remove(); }
  view.first = Number(box.firstElementChild.dataset.n);
  box.scrollTop = top - gone;
}

const atEnd = () => box.scrollHeight - box.scrollTop - box.clientHeight < 40;
const toEnd = () => { box.scrollTop = box.scrollHeight; };

function setFollow(wanted) {
  view.follow = wanted;
  document.querySelector("[data-do=follow]").setAttribute("aria-pressed", String(wanted));
}

// One thing at a time: what is asked for meanwhile comes after it, once.
let work = Promise.resolve(), waiting = new Set();
function queue(name, action) {
  if (waiting.has(name)) return work;
  waiting.add(name);
  work = work.then(() => { waiting.delete(name); return action(); }).catch(console.warn);
  return work;
}

async function catchUp() {
  if (view.follow && !view.pinned) {
    const attempt = view.attempt;
    view.attempt = 0;
    const now = await ask("", { count: 0 });
    view.attempt = attempt;
    if (now && now.attempt !== attempt) { view.attempt = now.attempt; await show(null); return toEnd(); }
    if (now) note(now);
  } else {
    const now = await ask("", { first: 1, count: 0 });
    if (now) note(now);
  }
  const shown = view.last;
  if (view.follow && view.total - view.last > PIECE) await show(null);
  else if (view.follow || (atEnd() && view.total - view.last <= 1)) await after();
  if (view.follow && (view.last !== shown || !atEnd())) toEnd();
}

// ---- Search ---------------------------------------------------------------------------------------------------------

async function find(step) {
  const text = document.querySelector("#log-q").value;
  const told = document.querySelector("#log-found");
  if (!text) { Object.assign(search, { text: "", lines: [], at: -1 }); told.textContent = ""; return goTo(view.first, false); }
  if (text !== search.text || !view.over) {
    const answer = await ask("/find", { q: text });
    if (!answer) { told.textContent = "The server does not answer."; return; }
    const kept = text === search.text ? search.lines[search.at] : undefined;
    Object.assign(search, { text, lines: answer.lines, more: answer.more });
    search.at = kept === undefined ? -1 : search.lines.indexOf(kept);
  }
  if (!search.lines.length) { told.textContent = "Not found"; await goTo(view.first, false); return; }
  if (search.at >= 0) search.at = (search.at + step + search.lines.length) % search.lines.length;
  else {
    const top = firstVisible(), next = search.lines.findIndex((each) => each >= top);
    search.at = step > 0 ? (next < 0 ? 0 : next) : (next <= 0 ? search.lines.length : next) - 1;
  }
  told.textContent = `${(search.at + 1).toLocaleString()} of ${search.lines.length.toLocaleString()}${search.more ? "+" : ""} lines`;
  setFollow(false);
  await goTo(search.lines[search.at], true);
}

function firstVisible() {
  const top = box.getBoundingClientRect().top;
  for (const each of box.children) if (each.getBoundingClientRect().bottom > top) return Number(each.dataset.n);
  return 1;
}

// Shows the lines around that one, and that one in the middle.
async function goTo(number, middle) {
  if (!(await show(Math.max(1, number - PIECE / 2)))) return;
  const row = box.querySelector(`[data-n="${number}"]`);
  if (row) box.scrollTop = row.offsetTop - box.offsetTop - (middle ? box.clientHeight / 2 : 0);
}

// ---- The reader -----------------------------------------------------------------------------------------------------

function setWrap(wanted) {
  box.classList.toggle("wrapped", wanted);
  document.querySelector("[data-do=wrap]").setAttribute("aria-pressed", String(wanted));
  try { localStorage.setItem("diamond-log-wrap", wanted ? "1" : "0"); } catch { /* it is only remembered */ }
}

let touched = 0;
for (const kind of ["wheel", "touchmove", "keydown", "pointerdown"]) box.addEventListener(kind, () => { touched = Date.now(); }, { passive: true });
box.addEventListener("scroll", () => {
  // Only a reader's own scrolling says that they want to read here, or to go on with what comes.
  if (Date.now() - touched < 1500) {
    if (view.follow && !atEnd()) setFollow(false);
    else if (!view.follow && atEnd() && view.last >= view.total && !view.over) setFollow(true);
  }
  if (box.scrollTop < NEAR_PX && view.first > 1) queue("before", before);
  if (box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX && view.last < view.total) queue("after", after);
}, { passive: true });

card.querySelector("form[role=search]").addEventListener("submit", (event) => { event.preventDefault(); queue("find", () => find(1)); });
card.querySelector("#log-q").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.shiftKey) { event.preventDefault(); queue("find", () => find(-1)); }
});
card.querySelector("[data-do=previous]").addEventListener("click", () => queue("find", () => find(-1)));
card.querySelector("[data-do=wrap]").addEventListener("click", () => setWrap(!box.classList.contains("wrapped")));
card.querySelector("[data-do=follow]").addEventListener("click", () => {
  setFollow(!view.follow);
  if (view.follow) queue("tail", async () => { await show(null); toEnd(); });
});
card.querySelector("[data-do=go]").addEventListener("submit", (event) => {
  event.preventDefault();
  const wanted = Number(document.querySelector("#log-line").value);
  if (wanted >= 1) { setFollow(false); queue("go", () => goTo(Math.min(wanted, Math.max(1, view.total)), true)); }
});
card.querySelector("#attempt").addEventListener("change", (event) => {
  const chosen = Number(event.target.value);
  Object.assign(view, { attempt: chosen, pinned: chosen > 0 });
  Object.assign(search, { text: "", lines: [], at: -1 });
  document.querySelector("#log-download").href = `${card.dataset.address}/download${chosen ? `?attempt=${chosen}` : ""}`;
  queue("tail", async () => { await show(null); toEnd(); setFollow(!view.over); });
});
document.addEventListener("diamond:fresh", () => queue("more", catchUp));

queue("start", async () => {
  if (!(await show(null))) return;
  document.querySelector("#log-plain").remove();
  card.querySelector("[data-plain]").hidden = true;
  card.querySelector(".log-tools").hidden = false;
  box.hidden = false;
  let kept = "1";
  try { kept = localStorage.getItem("diamond-log-wrap") ?? "1"; } catch { /* then it is as usual */ }
  setWrap(kept === "1");
  setFollow(!view.over);
  toEnd();
});
