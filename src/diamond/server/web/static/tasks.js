// The Task Manager: all rows ticked at once, how many are, and durations that go on while one looks.
const all = document.querySelector("#all");
const many = document.querySelector("#how-many");
const ticks = () => [...document.querySelectorAll("tbody input[type=checkbox][name^=pick_]")];

function count() {
  const boxes = ticks(), number = boxes.filter((each) => each.checked).length;
  many.textContent = number ? `${number} ticked:` : "Tick tasks to stop, repeat or delete several at once.";
  for (const each of document.querySelectorAll("#chosen button")) each.disabled = !number;
  all.checked = number > 0 && number === boxes.length;
  all.indeterminate = number > 0 && number < boxes.length;
}

if (all && many) {
  all.hidden = false;
  all.addEventListener("change", () => { for (const each of ticks()) each.checked = all.checked; count(); });
  document.addEventListener("change", (event) => { if (event.target.name?.startsWith("pick_")) count(); });
  document.addEventListener("diamond:fresh", count);
  addEventListener("pageshow", count);
  count();
}

// A filter that is chosen needs no button.
for (const each of document.querySelectorAll("form[role=search][action='/tasks'] select")) {
  each.addEventListener("change", () => each.form.requestSubmit());
}

// A menu is closed by Escape, and by a click beside it.
const menu = document.querySelector("#columns");
if (menu) {
  document.addEventListener("click", (event) => { if (!menu.contains(event.target)) menu.open = false; });
  menu.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && menu.open) { menu.open = false; menu.querySelector("summary").focus(); }
  });
}

// As `format_duration` of the server writes it.
const two = (number) => String(number).padStart(2, "0");
function span(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h ${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)}d ${two(Math.floor((whole % 86400) / 3600))}h`;
}
setInterval(() => {
  if (document.hidden) return;
  for (const each of document.querySelectorAll("[data-since]")) each.textContent = span(Date.now() / 1000 - Number(each.dataset.since));
}, 1000);
