/* The list of conversations. */

import { byId, h, iconButton } from "./dom.js";

export const titleOf = (conversation) => conversation.title || "New conversation";

/** `actions`: open, rename, save, remove; each gets the conversation. */
export function showConversations(conversations, current, actions) {
  const items = conversations.map((conversation) => {
    const title = titleOf(conversation);
    const chosen = conversation.id === current.id;
    return h(
      "li",
      { class: chosen ? "chosen" : null },
      h("button", { type: "button", class: "title", "aria-current": chosen ? "true" : null, click: () => actions.open(conversation) }, title),
      h(
        "span",
        { class: "tools" },
        iconButton("edit", `Rename ${title}`, () => actions.rename(conversation)),
        iconButton("save", `Save ${title} as a file`, () => actions.save(conversation)),
        iconButton("trash", `Delete ${title}`, () => actions.remove(conversation)),
      ),
    );
  });
  byId("conversations").replaceChildren(...items);
  byId("delete-all").hidden = !conversations.length;
}

/** Light, dark, or as the system says; kept by the browser. */
export function startTheme(settings) {
  const select = byId("theme");
  const apply = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };
  select.value = settings.get("theme", "system");
  apply(select.value);
  select.addEventListener("change", () => {
    settings.set("theme", select.value);
    apply(select.value);
  });
}
