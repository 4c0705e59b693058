// A code that came behind the "#" of a link goes into the form, and out of the address bar and the history.
// Browsers never send that part to a server, so no log of any server holds it.
const hash = decodeURIComponent(location.hash.slice(1));
const code = hash.startsWith("code=") ? hash.slice(5) : hash;

if (/^[A-Za-z0-9_-]{4,200}$/.test(code)) {
  const field = document.querySelector("input[name=code]");
  const next = document.querySelector("input[name=next]");
  if (field) {
    field.value = code;
    history.replaceState(null, "", location.pathname + location.search);
    const empty = [...field.form.querySelectorAll("input:not([type=hidden])")].find((each) => !each.value);
    (empty ?? field.form.querySelector("button")).focus();
  } else if (next && !next.value.includes("#")) {
    // Sign in first, then there.
    next.value += "#" + code;
  }
}
