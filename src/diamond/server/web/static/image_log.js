// The log on this page is that of one task. When another one makes the image, since none had begun or it is made again,
// the page is loaded anew with that one's log.
const shown = document.querySelector("#log")?.dataset.address.split("/")[2] ?? "";
document.addEventListener("diamond:fresh", () => {
  const now = document.querySelector("[data-task]")?.dataset.task ?? "";
  if (now !== shown) location.reload();
});
