// The composer: the form and the YAML follow each other, the endpoint's choices come anew, and Tab indents.
import { forget, keep } from "./keep.js";

const form = document.getElementById("composer");
const yaml = form.elements.yaml, base = form.elements.base;
const inStep = document.getElementById("in-step");
const REST_MS = 350;
document.documentElement.classList.add("scripted");

// ---- the two sides -----------------------------------------------------------------------------------------------
let timer = null, turn = 0;

function text(extra) {
  const data = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (typeof value === "string" && !name.startsWith("drop:")) data.append(name, value);
  for (const [name, value] of Object.entries(extra)) data.set(name, value);
  return data;
}

function later(side) {
  clearTimeout(timer);
  timer = setTimeout(() => sync(side), REST_MS);
}

async function sync(side) {
  const mine = ++turn;
  inStep.textContent = "";
  const answer = await fetch("/compose/sync", { method: "POST", body: text({ side }) }).catch(() => null);
  if (mine !== turn) return; // typed on meanwhile
  if (!answer) return say("The server does not answer. What you type is kept in this tab.");
  if (answer.status === 401 || answer.status === 403) return signedOut();
  if (!answer.ok) return say("The server could not compare the two sides. Nothing is lost.");
  const found = await answer.json();
  if (mine !== turn) return;
  blame(found);
  if (found.text_error && side === "text") return keep(form);
  if (!found.in_step) {
    const waits = Object.keys(found.errors).filter((name) => ["envs", "secrets"].includes(name)).map(labelOf);
    say(waits.length ? `The YAML waits until ${waits.join(" and ")} are right.` : "The YAML waits until the form can be read.");
    return keep(form);
  }
  if (side === "text") fill(found.values);
  else {
    yaml.value = found.text;
    number(yaml);
  }
  base.value = found.base;
  inStep.textContent = "Form and YAML are in step.";
  keep(form);
}

function fill(values) {
  let moved = false;
  for (const [name, value] of Object.entries(values)) {
    const each = form.elements[name];
    if (!each || each.value === value || (value === "" && /^[01]$/.test(each.value) && ["num_nodes", "retries", "priority"].includes(name))) continue;
    moved ||= name === "endpoint";
    put(each, value);
    if (each.matches("[data-editor]")) number(each);
  }
  kind();
  if (moved) offer();
}

// What is not offered stays, and says so.
function put(each, value) {
  if (each.tagName === "SELECT" && ![...each.options].some((one) => one.value === value)) each.add(new Option(`${value} (not offered here)`, value));
  each.value = value;
}

function blame(found) {
  const line = document.getElementById("yaml-error");
  line.hidden = !found.text_error;
  line.querySelector("span").textContent = found.text_error;
  yaml.toggleAttribute("aria-invalid", Boolean(found.text_error));
  if (found.text_error) yaml.setAttribute("aria-invalid", "true");
  for (const each of form.querySelectorAll(".field > .error[id]")) {
    const name = each.id.slice(0, -"-error".length);
    if (name === "yaml" || name.startsWith("template_")) continue;
    const words = found.errors[name] ?? "";
    each.hidden = !words;
    each.querySelector("span").textContent = words;
    const control = form.elements[name === "workdir" ? "files" : name];
    if (words) control?.setAttribute("aria-invalid", "true"); else control?.removeAttribute("aria-invalid");
  }
  strikeOut({ ...found.errors, yaml: found.text_error });
}

// The line at the top names what is still to be corrected; with the last of it, it goes.
function strikeOut(errors) {
  const line = document.querySelector("#told [data-fields]");
  if (!line) return;
  for (const link of line.querySelectorAll("a")) {
    const name = link.hash.slice(1);
    if (!name.startsWith("template_") && !errors[name === "files" ? "workdir" : name]) link.parentElement.remove();
  }
  const left = line.querySelectorAll("a");
  if (!left.length) return line.remove();
  line.querySelector("span").textContent = left.length === 1 ? "One field needs" : `${left.length} fields need`;
  left[left.length - 1].nextSibling.textContent = ".";
}

function labelOf(name) { return form.querySelector(`label[for="${name}"]`)?.textContent ?? name; }

// In the middle, where neither the bar below nor anything else covers it.
function reveal(control) {
  control.focus({ preventScroll: true });
  (control.closest(".field") ?? control).scrollIntoView({ block: "center" });
}

// What somebody has to see first of a page that came back.
function point() {
  const result = document.getElementById("plan");
  if (result) return result.focus();
  if (document.querySelector("#told .problem:not([data-fields])")) return document.getElementById("told").focus();
  const wrong = [...form.querySelectorAll("[aria-invalid=true]")].find((each) => each.checkVisibility?.() ?? true);
  if (wrong) reveal(wrong);
}

function say(words) { inStep.textContent = words; }

function signedOut() {
  inStep.textContent = "You were signed out. What you typed is kept in this tab: ";
  const link = document.createElement("a");
  link.href = "/sign-in?next=" + encodeURIComponent(location.pathname + location.search);
  link.textContent = "sign in again";
  inStep.append(link);
}

form.addEventListener("input", (event) => {
  const name = event.target.name ?? "";
  if (name === "yaml") later("text");
  else if (!name.startsWith("template_") && !name.startsWith("drop:") && !["files", "folder"].includes(name)) later("form");
  if (event.target.matches("[data-editor]")) number(event.target);
});

// ---- what the endpoint has ---------------------------------------------------------------------------------------
async function offer() {
  const data = new FormData(form);
  data.delete("files");
  data.set("do", "offer");
  for (const name of [...data.keys()]) if (name.startsWith("drop:")) data.delete(name);
  const answer = await fetch("/compose", { method: "POST", body: data, headers: { "Diamond-Part": "1" } }).catch(() => null);
  if (!answer) return say("The server does not answer. The choices may be of another endpoint.");
  if (answer.status === 401 || answer.status === 403) return signedOut();
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const old of form.querySelectorAll('[data-offer="place"], [data-offer="inside"]')) {
    const found = fresh.querySelector(`[data-offer="${old.dataset.offer}"]`);
    if (!found) continue;
    const at = old.contains(document.activeElement) ? document.activeElement : null;
    const spot = at?.selectionStart ?? null;
    // What was typed while the answer was on its way is newer than the answer.
    for (const each of old.querySelectorAll("input[name], select[name]")) {
      const into = found.querySelector(`[name="${each.name}"]`);
      if (into) put(into, each.value);
    }
    old.replaceWith(document.adoptNode(found));
    if (at) {
      const again = document.getElementById(at.id);
      again?.focus();
      if (spot !== null) again?.setSelectionRange?.(spot, spot);
    }
  }
  kind();
}
form.addEventListener("change", (event) => {
  if (event.target.name === "endpoint") offer();
  if (event.target.name === "type") kind();
  if (event.target.name === "files") check(event.target);
});
function kind() { form.classList.toggle("plain-type", form.elements.type.value === "command"); }

function check(input) {
  const size = [...input.files].reduce((sum, file) => sum + file.size, 0);
  const tooMuch = size > Number(input.dataset.maxBytes) || input.files.length > Number(input.dataset.maxFiles);
  const line = document.getElementById("workdir-error");
  line.hidden = !tooMuch;
  line.querySelector("span").textContent = tooMuch
    ? `${input.files.length} files of ${size} bytes were chosen; at most ${input.dataset.maxFiles} files of ${input.dataset.maxBytes} bytes altogether can be sent from a page.` : "";
  if (tooMuch) { input.value = ""; input.setAttribute("aria-invalid", "true"); } else input.removeAttribute("aria-invalid");
}

// ---- the dry run: shown here, so that nothing has to be sent again to come back to it ------------------------------
async function plan(submitter) {
  const mine = ++turn;
  say("Trying…");
  const sent = new FormData(form, submitter);
  const answer = await fetch("/compose", { method: "POST", body: sent, headers: { "Diamond-Part": "1" } }).catch(() => null);
  if (!answer) return say("The server does not answer. What you type is kept in this tab; try the dry run again.");
  if (answer.status === 401 || answer.status === 403) return signedOut();
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const found = fresh.getElementById("composer");
  if (!found) return submitWith("plan"); // the page that says why is the server's own
  for (const id of ["plan", "told"]) {
    const old = document.getElementById(id), now = fresh.getElementById(id);
    if (old && now) old.replaceWith(document.adoptNode(now));
    else if (now) form.before(document.adoptNode(now));
    else old?.remove();
  }
  if (mine === turn) takeOver(found); // else typed on meanwhile: what is here is newer
  const errors = {};
  for (const each of found.querySelectorAll(".field > .error[id]:not([hidden])")) errors[each.id.slice(0, -"-error".length)] = each.textContent.trim();
  blame({ errors, text_error: errors.yaml ?? "" });
  keep(form);
  say(document.getElementById("plan") ? "The dry run is done; its result is at the top of the page." : "The dry run found something to correct.");
  point();
}

// The page as the server has it now: files that were sent are in the work directory, both sides are settled.
function takeOver(found) {
  const files = form.querySelector('[data-offer="files"]'), now = found.querySelector('[data-offer="files"]');
  for (const each of found.elements) {
    const ours = form.elements[each.name];
    if (!each.name || !("value" in (ours ?? {})) || ["csrf", "key"].includes(each.name) || ["file", "checkbox", "submit"].includes(each.type)) continue;
    if (each.name.startsWith("template_") || ours.value === each.value) continue;
    put(ours, each.value);
    if (ours.matches("[data-editor]")) number(ours);
  }
  if (files && now) files.replaceWith(document.adoptNode(now));
  kind();
}

function submitWith(action) {
  const again = document.createElement("input");
  again.type = "hidden"; again.name = "do"; again.value = action;
  form.append(again);
  form.submit();
}

// ---- launching: what was typed is forgotten only when the task is made -------------------------------------------
let launching = false;
form.addEventListener("submit", async (event) => {
  clearTimeout(timer);
  turn += 1;
  if (!["launch", "plan"].includes(event.submitter?.value)) return;
  event.preventDefault();
  if (event.submitter.value === "plan") return plan(event.submitter);
  if (launching) return;
  launching = true;
  const data = new FormData(form, event.submitter);
  const answer = await fetch("/compose", { method: "POST", body: data, headers: { "Diamond-Script": "1" } }).catch(() => null);
  launching = false;
  if (!answer) return say("The server does not answer. Nothing was launched twice: press Launch again.");
  if (answer.status === 401 || answer.status === 403) return signedOut();
  if (answer.ok && answer.headers.get("content-type")?.startsWith("application/json")) {
    forget(form);
    location.assign((await answer.json()).to);
    return;
  }
  // Something is wrong with it: the page that says so is the server's own.
  submitWith("launch");
});
// Back from the task: this page may launch another one.
addEventListener("pageshow", (event) => {
  for (const each of form.querySelectorAll("input[type=hidden][name=do]")) each.remove();
  if (event.persisted) form.elements.key.value = crypto.randomUUID().replaceAll("-", "");
});

// ---- editing -----------------------------------------------------------------------------------------------------
let leave = false;
form.addEventListener("keydown", (event) => {
  const area = event.target;
  if (!area.matches?.("textarea[data-editor]")) return;
  if (event.key === "Escape") { leave = true; return; }
  if (event.key !== "Tab" || event.ctrlKey || event.altKey || event.metaKey) { if (event.key !== "Shift") leave = false; return; }
  if (leave) { leave = false; return; }
  event.preventDefault();
  const step = " ".repeat(Number(area.dataset.indent ?? 4));
  const { selectionStart: from, selectionEnd: until, value } = area;
  const first = value.lastIndexOf("\n", from - 1) + 1;
  if (from === until && !event.shiftKey) { area.setRangeText(step, from, until, "end"); }
  else {
    const block = value.slice(first, until).split("\n");
    const changed = block.map((each) => event.shiftKey ? each.replace(new RegExp(`^ {1,${step.length}}|^\t`), "") : each && step + each).join("\n");
    area.setRangeText(changed, first, until, from === until ? "end" : "select");
  }
  area.dispatchEvent(new Event("input", { bubbles: true }));
});

function number(area) {
  const lines = area.parentElement.querySelector(".numbers");
  if (!lines) return;
  const count = area.value.split("\n").length;
  if (lines.dataset.count === String(count)) return;
  lines.dataset.count = count;
  lines.textContent = Array.from({ length: Math.min(count, 20000) }, (_, at) => at + 1).join("\n");
}
for (const area of form.querySelectorAll("textarea[data-editor]")) {
  const box = document.createElement("div"), lines = document.createElement("div");
  box.className = "numbered";
  lines.className = "numbers";
  lines.setAttribute("aria-hidden", "true");
  area.replaceWith(box);
  box.append(lines, area);
  area.addEventListener("scroll", () => { lines.scrollTop = area.scrollTop; });
  area.addEventListener("blur", () => { leave = false; });
  number(area);
}
kind();
if (!document.getElementById("kept")?.hidden) offer();
if (document.body.hasAttribute("data-answered")) point();
