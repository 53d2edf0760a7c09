// Hands what changes often to the tokens, whose own data is then sent once.
export default function (component) {
  window.kvsimTokens = component.data;
  window.dispatchEvent(new CustomEvent("kvsim-tokens", { detail: component.data }));
  return () => {
    delete window.kvsimTokens;
  };
}
