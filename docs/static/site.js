// What is wider than the page can be scrolled from the keyboard.
function reachable() {
  for (const box of document.querySelectorAll("pre, .table-wrapper"))
    box.scrollWidth > box.clientWidth ? box.setAttribute("tabindex", 0) : box.removeAttribute("tabindex");
}
addEventListener("load", reachable);
addEventListener("resize", reachable);
