// Keeps what is typed into <form data-keep="NAME"> for this tab: through F5, back, a broken line and an expired session.
//
// sessionStorage belongs to one tab, so ten tabs do not mix; what is kept is filed under who typed it, and goes when
// they sign out or somebody else is here. It is filed by where the form is sent; with data-keep-at, by the address the
// form was opened at, and then only its own script knows when it is done with. Otherwise that is so when the server has
// led on to another page. Passwords and what is marked data-secret are never kept.
const SKIP = new Set(["csrf", "key", "once", "back"]);
const NOT_TYPED = ["file", "submit", "button", "password"];
const ALL = "diamond:";
const person = document.body.getAttribute("data-person") ?? "";
const mine = `${ALL}keep:${person}:`, sent = `${ALL}sent:${person}`;
const answered = document.body.hasAttribute("data-answered");
const how = performance.getEntriesByType("navigation")[0];
const given = new WeakMap(); // what the server put into each form
const unseen = new WeakMap(); // what it put into hidden fields, which form.reset() leaves as they are
const dirty = new Set();
let timer = null, over = false;

// What is full, or not allowed, keeps nothing; the page works all the same.
function stored(action) { try { return action(sessionStorage); } catch { return null; } }
function drop(which) { stored((all) => { for (const each of Object.keys(all)) if (each.startsWith(ALL) && which(each)) all.removeItem(each); }); }

// By getAttribute: a field called "dataset" or "action" takes the place of the form's own property.
function nameOf(form) { return `${mine}${form.getAttribute("data-keep")}:`; }
function isOpenEnded(form) { return form.hasAttribute("data-keep-at"); }
function keyOf(form) { return nameOf(form) + (isOpenEnded(form) ? location.pathname + location.search : form.getAttribute("action")); }

function fields(form) {
  return [...form.elements].filter((each) => each.name && !SKIP.has(each.name) && !NOT_TYPED.includes(each.type) && !each.hasAttribute("data-secret"));
}

function snapshot(form) {
  const found = {};
  for (const each of fields(form)) {
    if (each.type === "checkbox" || each.type === "radio") { if (each.checked) found[`${each.name}=${each.value}`] = true; }
    else found[each.name] = each.value;
  }
  return found;
}

export function keep(form) {
  dirty.delete(form);
  if (over || !person) return;
  const now = snapshot(form);
  if (JSON.stringify(now) === given.get(form)) stored((all) => all.removeItem(keyOf(form)));
  else stored((all) => all.setItem(keyOf(form), JSON.stringify({ at: Date.now(), fields: now })));
}

// Done with this form, at whichever address it was begun.
export function forget(form) {
  dirty.delete(form);
  drop((each) => each.startsWith(nameOf(form)));
}

// Puts back what was typed; true when that is something else than the page shows.
function restore(form) {
  const old = stored((all) => JSON.parse(all.getItem(keyOf(form)))?.fields);
  if (!old || JSON.stringify(old) === JSON.stringify(snapshot(form))) return false;
  unseen.set(form, fields(form).filter((each) => each.type === "hidden").map((each) => [each, each.value]));
  for (const each of fields(form)) {
    if (each.type === "checkbox" || each.type === "radio") each.checked = `${each.name}=${each.value}` in old;
    else if (each.name in old && each.value !== old[each.name]) {
      if (each.tagName === "SELECT" && ![...each.options].some((one) => one.value === old[each.name])) each.add(new Option(old[each.name], old[each.name]));
      each.value = old[each.name];
      const fold = each.type === "hidden" ? null : each.closest("details");
      if (fold) fold.open = true;
    }
  }
  return true;
}

function tell(form) {
  const known = document.getElementById("kept");
  if (known) { known.hidden = false; return; }
  const box = document.createElement("div"), words = document.createElement("p"), undo = document.createElement("button");
  box.className = "notice";
  box.setAttribute("role", "status");
  words.textContent = "What you had typed here is back. ";
  undo.type = "button";
  undo.className = "small";
  undo.textContent = "Drop it";
  undo.addEventListener("click", () => {
    forget(form);
    form.reset();
    for (const [each, value] of unseen.get(form) ?? []) each.value = value;
    box.remove();
  });
  words.append(undo);
  box.append(words);
  form.prepend(box);
}

function begin() {
  const forms = [...document.querySelectorAll("form[data-keep]")];
  // An answer to another form can show this one: then its own address is where it is found again.
  const at = forms.find(isOpenEnded)?.getAttribute("data-keep-at");
  if (at && at !== location.pathname) history.replaceState(null, "", at);
  drop((each) => !each.startsWith(mine) && each !== sent);
  const last = stored((all) => all.getItem(sent));
  stored((all) => all.removeItem(sent));
  const again = forms.find((each) => keyOf(each) === last);
  const isRefused = again && document.querySelector(".problem, .error:not([hidden])") !== null;
  if (last && how?.type === "navigate" && (how.redirectCount > 0 || (answered && !isRefused))) stored((all) => all.removeItem(last));
  for (const form of forms) {
    // What the server itself put on a page after it had been sent (errors, a dry run) is newer than what is kept.
    const isAnswer = answered && (form === again ? isRefused : isOpenEnded(form));
    if (!isAnswer) given.set(form, JSON.stringify(snapshot(form)));
    if ((!isAnswer || how?.type === "back_forward" || how?.type === "reload") && restore(form)) tell(form);
    if (isAnswer) keep(form);
    form.setAttribute("autocomplete", "off"); // or the browser would keep it as well, for whoever comes back here
  }
}

function keptForm(event) {
  const form = event.target.form ?? event.target;
  return form.matches?.("form[data-keep]") ? form : null;
}

if (person) {
  begin();
  document.addEventListener("input", (event) => {
    const form = keptForm(event);
    if (!form) return;
    dirty.add(form);
    clearTimeout(timer);
    timer = setTimeout(() => [...dirty].forEach(keep), 150);
  });
  document.addEventListener("change", (event) => { const form = keptForm(event); if (form) keep(form); });
  document.addEventListener("submit", (event) => {
    if (event.target.getAttribute("action") === "/sign-out") { over = true; drop(() => true); return; }
    const form = keptForm(event);
    if (!form) return;
    keep(form);
    if (!isOpenEnded(form)) stored((all) => all.setItem(sent, keyOf(form)));
  });
  addEventListener("pagehide", () => [...dirty].forEach(keep));
  for (const link of document.querySelectorAll("[data-forget]")) {
    link.addEventListener("click", () => document.querySelectorAll("form[data-keep-at]").forEach(forget));
  }
} else drop((each) => each.startsWith(`${ALL}sent:`)); // refused: it is not done with
