// Buttons that copy a text. Without this script the text can be selected; the buttons stay hidden then.
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.hidden = false;
  const label = button.querySelector("span");
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.textContent.trim());
      label.textContent = "Copied";
    } catch {
      // Not allowed (no HTTPS, or the person said no): choose it, so that one key copies it.
      getSelection().selectAllChildren(source);
      label.textContent = "Press Ctrl-C";
    }
    setTimeout(() => { label.textContent = "Copy"; }, 3000);
  });
}
