// The menu, the theme, the copied link, and parts that open when a link leads to them.
byId("theme").onchange = ({ target }) => {
  document.documentElement.style.colorScheme = target.value;
};

byId("menu").addEventListener("click", ({ target }) => {
  if (target.matches("a") && byId("menu").matches(":popover-open")) byId("menu").hidePopover();
});

// The credit view names the rollout that it shows in the data of the page.
byId("copy").onclick = async ({ target }) => {
  const [address, part] = location.href.split("#");
  const link = document.body.dataset.rollout ?? (part ? `#${part}` : "");
  const isCopied = await navigator.clipboard.writeText(address + link).then(() => true, () => false);
  target.textContent = isCopied ? "Copied" : address + link;
  setTimeout(() => { target.textContent = "Copy link"; }, 3000);
};

const openLinkedPart = () => {
  const part = byId(location.hash.slice(1));
  if (part instanceof HTMLDetailsElement) part.open = true;
};
addEventListener("hashchange", openLinkedPart);
openLinkedPart();
