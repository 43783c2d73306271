// The search takes a dash before a word for "without this word". Here it starts the name of an option: --data.flip
// becomes +data +flip*, places with both words.
const post = Worker.prototype.postMessage;
const words = (name) => name.split(/[.-]+/).filter(Boolean).map((word) => `+${word}`);
Worker.prototype.postMessage = function (message, ...others) {
  if (typeof message?.data === "string") {
    const query = message.data.replace(/(^|\s)-+(\w[\w.-]*)/g, (_, space, name) => `${space}${words(name).join(" ")}*`);
    message = {...message, data: query};
  }
  return post.call(this, message, ...others);
};
