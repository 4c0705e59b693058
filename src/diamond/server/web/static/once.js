// A button beside what is shown once: <div data-once="ID of the field">.
for (const place of document.querySelectorAll("[data-once]")) {
  const field = document.getElementById(place.dataset.once);
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    field.select();
    try {
      await navigator.clipboard.writeText(field.value);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Press Ctrl-C"; // it is selected; only pages over HTTPS or on localhost may do it themselves
    }
  });
  field.addEventListener("focus", () => field.select());
  place.append(button);
}
