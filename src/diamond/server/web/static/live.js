// Keeps an open page up to date, and times in the reader's own clock.
//
// <main data-topics="events task:ID"> names what to wait for; each element with data-live="NAME" is replaced by its
// namesake in a fresh copy of the page. Children with data-key are replaced one by one, so that a table keeps its
// place, its focus and what is ticked. data-every="SECONDS" looks again without being told.
//
// One stream a page, closed while nobody looks; looking every two seconds where no stream can be had. A browser has six
// connections to a server for all its windows: streams take three of them at most, each held by a lock.
const main = document.querySelector("main[data-topics], main[data-every]");
const REST_MS = 1000, POLL_MS = 2000, MOST_STREAMS = 3;

const clock = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
export function localTimes(root) {
  for (const each of root.querySelectorAll("time[datetime]:not([data-shown])")) {
    each.title = each.textContent;
    each.textContent = clock.format(new Date(each.dateTime));
    each.dataset.shown = "";
  }
}
localTimes(document);

let looking = null, again = false, last = 0, made = main?.dataset.made ?? 0;

export async function lookAgain() {
  if (looking) { again = true; return looking; }
  looking = look().finally(() => { looking = null; if (again) { again = false; setTimeout(lookAgain, REST_MS); } });
  return looking;
}

async function look() {
  const wait = last + REST_MS - Date.now();
  if (wait > 0) await new Promise((done) => setTimeout(done, wait));
  const asked = await fetch(location.href, { headers: { "Diamond-Part": "1" }, redirect: "manual" }).catch(() => null);
  last = Date.now();
  if (!asked) return stale("The server does not answer. This page shows what was known before.");
  if (asked.type === "opaqueredirect" || asked.status === 401) return stale("You were signed out. Reload to sign in.");
  if (!asked.ok) return stale(asked.status === 404 ? "This is no longer there." : "The server could not show this page anew.");
  stale("");
  made = asked.headers.get("Diamond-Made") ?? 0;
  const fresh = new DOMParser().parseFromString(await asked.text(), "text/html");
  for (const old of document.querySelectorAll("[data-live]")) {
    const found = fresh.querySelector(`[data-live="${CSS.escape(old.dataset.live)}"]`);
    if (found) renew(old, document.adoptNode(found));
  }
  localTimes(document);
  document.dispatchEvent(new CustomEvent("diamond:fresh"));
}

function renew(old, fresh) {
  const keyed = fresh.querySelector(":scope > [data-key]") || old.querySelector(":scope > [data-key]");
  if (!keyed) {
    if (!same(old, fresh) && !busy(old)) { keepOpen(old, fresh); old.replaceWith(fresh); }
    return;
  }
  const before = new Map([...old.children].map((each) => [each.dataset.key, each]));
  const wanted = [...fresh.children].map((each) => {
    const known = before.get(each.dataset.key);
    before.delete(each.dataset.key);
    if (known && (same(known, each) || busy(known))) return known;
    if (known) keepTicks(known, each), keepOpen(known, each), known.replaceWith(each);
    return each;
  });
  for (const gone of before.values()) gone.remove();
  wanted.forEach((each, at) => { if (old.children[at] !== each) old.insertBefore(each, old.children[at] ?? null); });
}

function same(one, other) { return words(one) === words(other); }
// As the server wrote it: without what this page and its reader did to it.
function words(node) {
  const copy = node.cloneNode(true);
  for (const each of copy.querySelectorAll("time[data-shown]")) {
    each.textContent = each.title;
    each.removeAttribute("title");
    each.removeAttribute("data-shown");
  }
  for (const each of copy.querySelectorAll("details")) each.removeAttribute("open");
  for (const each of copy.querySelectorAll("input[name=csrf]")) each.removeAttribute("value"); // looks different each time
  return copy.outerHTML;
}
// Whoever types or has a menu open is not interrupted.
function busy(node) { const at = document.activeElement; return node.contains(at) && at.matches("input:not([type=checkbox]), select, textarea"); }
function keepTicks(old, fresh) {
  for (const each of old.querySelectorAll("input[type=checkbox]:checked")) {
    const found = [...fresh.querySelectorAll("input[type=checkbox]")].find((one) => one.name === each.name && one.value === each.value);
    if (found) found.checked = true;
  }
  if (old.contains(document.activeElement)) {
    const at = [...old.querySelectorAll("a, button, input, summary")].indexOf(document.activeElement);
    queueMicrotask(() => fresh.querySelectorAll("a, button, input, summary")[at]?.focus());
  }
}
function keepOpen(old, fresh) {
  const open = [...old.querySelectorAll("details[id]")].filter((each) => each.open).map((each) => each.id);
  for (const each of fresh.querySelectorAll("details[id]")) if (open.includes(each.id)) each.open = true;
}

function stale(words) {
  let line = document.querySelector(".stale");
  if (!words) return line?.remove();
  if (!line) { line = document.createElement("p"); line.className = "stale"; line.setAttribute("role", "status"); main.append(line); }
  line.textContent = words;
}

// One of the places for streams: what gives it back, or null when all are taken (or nobody can tell: no HTTPS).
async function place() {
  for (let number = 1; navigator.locks && number <= MOST_STREAMS; number += 1) {
    const giveBack = await new Promise((told) => {
      navigator.locks.request(`diamond-stream-${number}`, { ifAvailable: true }, (lock) => lock && new Promise((done) => told(done)))
        .then(() => told(null), () => told(null));
    });
    if (giveBack) return giveBack;
  }
  return null;
}

if (main) {
  const topics = (main.dataset.topics ?? "").split(" ").filter(Boolean);
  const every = Number(main.dataset.every ?? 0) * 1000;
  let stream = null, giveBack = null, timer = null, failed = 0, turn = 0;

  const close = () => { turn += 1; stream?.close(); stream = null; giveBack?.(); giveBack = null; clearInterval(timer); timer = null; };
  const poll = () => { close(); timer = setInterval(() => { lookAgain(); if (Math.random() < 0.1) open(); }, POLL_MS); };
  const open = async () => {
    close();
    if (every) timer = setInterval(lookAgain, every);
    if (!topics.length) return;
    const now = turn, found = await place();
    if (now !== turn) return found?.();
    if (!found) return poll();
    giveBack = found;
    // What happened between the page's making and now is told at once.
    stream = new EventSource("/live?" + [`made=${made}`, ...topics.map((each) => "topic=" + encodeURIComponent(each))].join("&"));
    stream.addEventListener("hello", () => { failed = 0; });
    stream.addEventListener("change", lookAgain);
    stream.addEventListener("error", () => {
      failed += 1;
      if (stream?.readyState === EventSource.CLOSED || failed > 3) poll();
    });
  };
  document.addEventListener("visibilitychange", () => { if (document.hidden) close(); else { lookAgain(); open(); } });
  addEventListener("pagehide", close);
  addEventListener("pageshow", (event) => { if (event.persisted) { lookAgain(); open(); } });
  if (!document.hidden) open();
}
