// Whoever writes the address of a base, or picks an image, means that choice: its button is pressed for them.
for (const [field, button] of [["other", "base-other"], ["base-of", "base-image"]]) {
  const from = document.getElementById(field), to = document.getElementById(button);
  from?.addEventListener("input", () => { if (to) to.checked = true; });
}
